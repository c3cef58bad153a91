"""gRPC services of prefill and decode workers without an engine, for tests of what talks to them.

async with FakeDecodeWorker("d0") as worker:      # listens on a free port of 127.0.0.1
    worker.report(running=3, hit_frequency=h)     # streams get it at once
    worker.hang.add("GetInfo")                    # that call is accepted and never answered
    await worker.restart()                        # same port, new incarnation
"""

import asyncio
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from eldr.routing.state import DecoderState
from eldr.rpc.codec import encode_signature, encode_state, encode_worker_info
from eldr.rpc.serving import Gate
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.signatures import FAKE_GEOMETRY
from eldr.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


def fake_info(worker_id: str, role: WorkerRole, **changes: Any) -> WorkerInfo:
    """A plausible WorkerInfo; any field can be given."""
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}-1",
        "role": role,
        "http_url": f"http://{worker_id}.fake:8000",
        "grpc_address": f"{worker_id}.fake:9000",
        "geometry": FAKE_GEOMETRY,
        "served_model": "fake",
        "block_size": 16,
        "engine_version": "fake-1",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "kv_layout": "float32",
    }
    return WorkerInfo(**(fields | changes))


class FakeWorker(ABC):
    """Serves one worker's gRPC port. `calls` counts what was asked, `hang` names calls that never answer.

    `gate` says whom it lets in.
    """

    def __init__(self, worker_id: str, role: WorkerRole, gate: Gate | None = None, **info: Any) -> None:
        self.gate = gate or Gate()
        self.info = fake_info(worker_id, role, **info)
        self.calls: dict[str, int] = {}
        self.hang: set[str] = set()
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._process = itertools.count(2)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        """host:port of the gRPC service, known once started."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listens, on the same port as before where there was one."""
        self._server = self.gate.server()
        self._add_to(self._server)
        self._port = self.gate.bind(self._server, self.address)
        self.info = dataclasses.replace(self.info, grpc_address=self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Ends at once, as a killed process does."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def restart(self, **info: Any) -> None:
        """A new process on the same port: new incarnation, fresh state."""
        await self.stop()
        incarnation = f"{self.info.worker_id}-{next(self._process)}"
        self.info = dataclasses.replace(self.info, **({"incarnation": incarnation} | info))
        await self.start()

    async def _asked(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if call in self.hang:
            await asyncio.Event().wait()

    @abstractmethod
    def _add_to(self, server: grpc.aio.Server) -> None: ...


class FakeDecodeWorker(FakeWorker):
    """DecodeService with a state that the test sets."""

    def __init__(self, worker_id: str = "d0", **info: Any) -> None:
        super().__init__(worker_id, WorkerRole.DECODE, **info)
        self._watchers: set[asyncio.Queue[DecoderState]] = set()
        self.state = self._fresh()
        self.decode_counts: dict[str, ExpertSignature] = {}
        """What GetDecodeCounts answers, by reservation id."""

    def report(self, **changes: Any) -> DecoderState:
        """Changes fields of the state, numbers the report, and sends it to every stream."""
        fields = {"sequence": self.state.sequence + 1} | changes
        self.state = dataclasses.replace(self.state, **fields)
        for watcher in self._watchers:
            watcher.put_nowait(self.state)
        return self.state

    @property
    def watchers(self) -> int:
        """Open state streams."""
        return len(self._watchers)

    async def restart(self, **info: Any) -> None:
        """See FakeWorker."""
        await super().restart(**info)
        self.state = self._fresh()

    def _fresh(self) -> DecoderState:
        return DecoderState(self.info.worker_id, self.info.incarnation, sequence=1)

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Callable[..., None] = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        add(self, server)

    async def GetInfo(self, request: Any, context: Context) -> decode_pb2.DecodeServiceGetInfoResponse:  # noqa: N802
        """RPC."""
        await self._asked("GetInfo")
        return decode_pb2.DecodeServiceGetInfoResponse(info=encode_worker_info(self.info))

    async def GetState(self, request: Any, context: Context) -> decode_pb2.GetStateResponse:  # noqa: N802
        """RPC."""
        await self._asked("GetState")
        return decode_pb2.GetStateResponse(state=encode_state(self.state))

    async def WatchState(  # noqa: N802
        self, request: decode_pb2.WatchStateRequest, context: Context
    ) -> AsyncIterator[decode_pb2.WatchStateResponse]:
        """RPC. Repeats the state every `period_s`, numbered anew, as an engine does."""
        await self._asked("WatchState")
        queue: asyncio.Queue[DecoderState] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield decode_pb2.WatchStateResponse(state=encode_state(self.state))
            while True:
                try:
                    async with asyncio.timeout(request.period_s or 0.5):
                        state = await queue.get()
                except TimeoutError:
                    if "WatchState" in self.hang:
                        continue
                    self.report()
                    state = queue.get_nowait()
                yield decode_pb2.WatchStateResponse(state=encode_state(state))
        finally:
            self._watchers.discard(queue)

    async def GetDecodeCounts(  # noqa: N802
        self, request: decode_pb2.GetDecodeCountsRequest, context: Context
    ) -> decode_pb2.GetDecodeCountsResponse:
        """RPC."""
        await self._asked("GetDecodeCounts")
        found = self.decode_counts.get(request.reservation_id)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no decode counts of {request.reservation_id!r}")
            raise AssertionError("abort raises")
        return decode_pb2.GetDecodeCountsResponse(signature=encode_signature(found))

    async def Drain(self, request: decode_pb2.DrainRequest, context: Context) -> decode_pb2.DrainResponse:  # noqa: N802
        """RPC."""
        await self._asked("Drain")
        state = self.report(draining=request.draining)
        return decode_pb2.DrainResponse(running=state.running, waiting=state.waiting)


class FakePrefillWorker(FakeWorker):
    """PrefillService with hand-offs that the test makes."""

    def __init__(self, worker_id: str = "p0", **info: Any) -> None:
        super().__init__(worker_id, WorkerRole.PREFILL, **info)
        self.held: set[str] = set()
        self.signatures: dict[str, ExpertSignature] = {}
        self.watched = asyncio.Event()
        """Set once somebody watches signatures."""
        self._watchers: set[asyncio.Queue[str]] = set()

    def hand_off(self, transfer_id: str, signature: ExpertSignature | None = None) -> None:
        """A prompt is complete: its KV waits for a decoder."""
        self.held.add(transfer_id)
        if signature is not None:
            self.signatures[transfer_id] = signature
            for watcher in self._watchers:
                watcher.put_nowait(transfer_id)

    async def restart(self, **info: Any) -> None:
        """See FakeWorker."""
        await super().restart(**info)
        self.held.clear()
        self.signatures.clear()

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Callable[..., None] = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
        add(self, server)

    async def GetInfo(self, request: Any, context: Context) -> prefill_pb2.PrefillServiceGetInfoResponse:  # noqa: N802
        """RPC."""
        await self._asked("GetInfo")
        return prefill_pb2.PrefillServiceGetInfoResponse(
            info=encode_worker_info(self.info), held_transfers=len(self.held)
        )

    async def GetSignature(  # noqa: N802
        self, request: prefill_pb2.GetSignatureRequest, context: Context
    ) -> prefill_pb2.GetSignatureResponse:
        """RPC."""
        await self._asked("GetSignature")
        if request.transfer_id not in self.signatures:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no signature of {request.transfer_id!r}")
        return prefill_pb2.GetSignatureResponse(
            signature=encode_signature(self.signatures[request.transfer_id])
        )

    async def WatchSignatures(  # noqa: N802
        self, request: Any, context: Context
    ) -> AsyncIterator[prefill_pb2.WatchSignaturesResponse]:
        """RPC."""
        await self._asked("WatchSignatures")
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._watchers.add(queue)
        self.watched.set()
        try:
            while True:
                transfer_id = await queue.get()
                signature = encode_signature(self.signatures[transfer_id])
                yield prefill_pb2.WatchSignaturesResponse(transfer_id=transfer_id, signature=signature)
        finally:
            self._watchers.discard(queue)

    async def ReleaseTransfer(  # noqa: N802
        self, request: prefill_pb2.ReleaseTransferRequest, context: Context
    ) -> prefill_pb2.ReleaseTransferResponse:
        """RPC."""
        await self._asked("ReleaseTransfer")
        mine = request.incarnation in ("", self.info.incarnation)
        released = mine and request.transfer_id in self.held
        if released:
            self.held.discard(request.transfer_id)
        return prefill_pb2.ReleaseTransferResponse(released=released)

    async def ConfirmTransfer(  # noqa: N802
        self, request: prefill_pb2.ConfirmTransferRequest, context: Context
    ) -> prefill_pb2.ConfirmTransferResponse:
        """RPC."""
        await self._asked("ConfirmTransfer")
        mine = request.incarnation in ("", self.info.incarnation)
        return prefill_pb2.ConfirmTransferResponse(intact=mine and request.transfer_id in self.held)
