"""Fake decoders for load on a router: state streams of real size at a fixed period, and nothing else."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np

from eldr.rpc.codec import encode_worker_info
from eldr.rpc.settings import server_options
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.v1 import decode_pb2

GEOMETRY = ModelGeometry(tuple(range(48)), 128, 8, "bench")
MODEL = "bench"
VARIANTS = 8
"""Different hit frequencies that a decoder reports in turn."""


class Decoder:
    """One decoder. `carried` are the reservations that its next report names."""

    def __init__(self, worker_id: str, period_s: float, frequencies: list[bytes]) -> None:
        self.worker_id = worker_id
        self.carried: set[str] = set()
        self.streams = 0
        self._period_s = period_s
        self._frequencies = itertools.cycle(frequencies)
        self._steps = 0
        self._sequence = itertools.count(1)
        self._server = grpc.aio.server(options=server_options())
        handlers = {
            "GetInfo": grpc.unary_unary_rpc_method_handler(
                self._get_info,
                request_deserializer=bytes,
                response_serializer=decode_pb2.DecodeServiceGetInfoResponse.SerializeToString,
            ),
            "WatchState": grpc.unary_stream_rpc_method_handler(
                self._watch_state,
                request_deserializer=bytes,
                response_serializer=decode_pb2.WatchStateResponse.SerializeToString,
            ),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("eldr.v1.DecodeService", handlers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _get_info(self, _request: bytes, _context: Any) -> decode_pb2.DecodeServiceGetInfoResponse:
        info = WorkerInfo(
            worker_id=self.worker_id,
            incarnation=f"{self.worker_id}-1",
            role=WorkerRole.DECODE,
            http_url=f"http://{self.worker_id}.bench:8000",
            grpc_address=self.address,
            geometry=GEOMETRY,
            served_model=MODEL,
            block_size=16,
            engine_version="bench",
            max_num_seqs=256,
        )
        return decode_pb2.DecodeServiceGetInfoResponse(info=encode_worker_info(info))

    async def _watch_state(
        self, _request: bytes, _context: Any
    ) -> AsyncIterator[decode_pb2.WatchStateResponse]:
        self.streams += 1
        try:
            while True:
                yield decode_pb2.WatchStateResponse(state=self._state())
                await asyncio.sleep(self._period_s)
        finally:
            self.streams -= 1

    def _state(self) -> decode_pb2.DecoderState:
        running = len(self.carried)
        self._steps += round(self._period_s / 0.02)
        return decode_pb2.DecoderState(
            worker_id=self.worker_id,
            incarnation=f"{self.worker_id}-1",
            sequence=next(self._sequence),
            running=running,
            kv_usage=0.4,
            kv_tokens=1000 * running,
            step_time_ewma_s=0.02,
            step_time_last_s=0.02,
            batch_last=running,
            union_last=64.0,
            hit_frequency=next(self._frequencies),
            layers=GEOMETRY.layers,
            experts=GEOMETRY.experts,
            reservation_ids=sorted(self.carried),
            totals=decode_pb2.DecoderTotals(
                decode_steps=self._steps,
                decode_tokens=self._steps * max(1, running),
                union_tokens=self._steps * max(1, running) * 64.0,
                step_time_s=self._steps * 0.02,
            ),
        )


async def start_decoders(count: int, period_s: float) -> list[Decoder]:
    """Serving decoders whose reports are spread over the period."""
    rng = np.random.default_rng(0)
    frequencies = [
        rng.integers(0, 256, GEOMETRY.layers * GEOMETRY.experts, np.uint8).tobytes() for _ in range(VARIANTS)
    ]
    decoders = [Decoder(f"d{i:03}", period_s, frequencies) for i in range(count)]
    for decoder in decoders:
        await decoder.start()
    return decoders
