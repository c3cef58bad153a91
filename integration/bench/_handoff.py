"""The gateway's and the router's work on one hand-off, for integration/bench/capture.py."""

import time
from typing import Any

import numpy as np

from eldr.router.core import RouterCore
from eldr.router.settings import RouterSettings
from eldr.router.signatures import read_signature
from eldr.routing.state import DecoderState, DecoderTotals
from eldr.rpc.codec import decode_query, encode_decision, signature_message_from_text
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.v1 import routing_pb2

BATCH = 16


class Router:
    """A router core with decoders that report a load of `BATCH` requests each."""

    def __init__(self, geometry: ModelGeometry, decoders: int = 16, seed: int = 0) -> None:
        self._core = RouterCore(RouterSettings())
        self._geometry = geometry
        self._names = [f"decode-{i}" for i in range(decoders)]
        self._rng = np.random.default_rng(seed)
        self._rounds = 0
        self._reserved = 0
        for name in self._names:
            self._core.register(_info(name, geometry))
        for _ in range(10):
            self._report()

    def route(self, text: str, prompt_tokens: int) -> float:
        """CPU seconds from the prefill answer's text to the decision's bytes, every decoder freshly reported.

        Everything but the transport between gateway and router.
        """
        self._report()
        self._reserved += 1
        reservation_id = f"request-{self._reserved}"
        begin = time.thread_time()
        query = routing_pb2.DecodeQuery(
            signature=signature_message_from_text(text), prompt_tokens=prompt_tokens, max_tokens=64
        )
        read = routing_pb2.DecodeQuery.FromString(query.SerializeToString())
        known = read_signature(read, self._geometry, 0.5)
        booked = self._core.reserve_decode(decode_query(reservation_id, read, known.signature, known.problem))
        assert booked.decision is not None
        encode_decision(booked.decision, None).SerializeToString()
        cpu_s = time.thread_time() - begin
        if booked.decision.fallback:
            raise RuntimeError(f"the router fell back: {booked.decision.fallback}")
        self._core.release(WorkerRole.DECODE, reservation_id, Outcome.COMPLETED)
        return cpu_s

    def _report(self) -> None:
        self._rounds += 1
        for name in self._names:
            self._core.report(self._state(name))

    def _state(self, name: str) -> DecoderState:
        hit = self._rng.random(self._geometry.shape, np.float32)
        union = self._geometry.experts / 2
        fields: dict[str, Any] = {"step_time_last_s": 0.05, "step_time_ewma_s": 0.05, "batch_last": BATCH}
        totals = DecoderTotals(
            decode_steps=10 * self._rounds,
            decode_tokens=10 * BATCH * self._rounds,
            union_tokens=10 * BATCH * union * self._rounds,
            step_time_s=0.5 * self._rounds,
        )
        return DecoderState(
            name,
            f"{name}-1",
            self._rounds,
            running=BATCH,
            union_last=union,
            hit_frequency=hit,
            totals=totals,
            **fields,
        )


def _info(name: str, geometry: ModelGeometry) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        incarnation=f"{name}-1",
        role=WorkerRole.DECODE,
        http_url="http://127.0.0.1:1",
        grpc_address="127.0.0.1:1",
        geometry=geometry,
        served_model="testbed",
        block_size=32,
        engine_version="bench",
        max_num_seqs=64,
    )
