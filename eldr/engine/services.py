"""gRPC services of one worker, on a thread and an event loop of their own inside the engine-core process."""

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health  # type: ignore[attr-defined]

from eldr.client import RouterClient, RouterError
from eldr.engine.config import EngineConfig
from eldr.engine.handoff import PrefillHandoff
from eldr.engine.scheduler import DecodeScheduler
from eldr.rpc.codec import encode_signature, encode_state, encode_worker_info
from eldr.rpc.settings import UNARY_TIMEOUT_S
from eldr.rpc.strict import Strict
from eldr.rpc.worker_info import WorkerInfo
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

log = structlog.get_logger()

REGISTER_PERIOD_S = 1.0
"""How often a worker repeats its registration, so that a restarted router is whole again soon."""

WATCH_BACKLOG = 256
"""Signatures that a slow reader of WatchSignatures may lag behind before it loses the oldest."""


class WorkerServer:
    """Serves one worker's services and keeps it registered with the routers of its configuration."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        self._config = config
        self._info = info
        self._gate = config.gate()
        self._caller = config.caller()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eldr-grpc", daemon=True)
        self._server: grpc.aio.Server | None = None
        self._health = aio_health.HealthServicer()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, service: "PrefillServicer | DecodeServicer") -> None:
        """Binds the address and serves. Raises RuntimeError that names the address where it cannot be bound."""
        self._thread.start()
        self._call(self._start(service))

    def call_soon(self, callback: Callable[..., None], *args: object) -> None:
        """Runs a callback on the server's loop. Any thread; never blocks."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(callback, *args)

    def stop(self, also: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Readiness off, then down, then `also` on the server's loop. Idempotent."""
        if not self._thread.is_alive():
            return
        self._call(self._stop())
        if also is not None:
            self._call(also())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(UNARY_TIMEOUT_S)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * UNARY_TIMEOUT_S)

    async def _start(self, service: "PrefillServicer | DecodeServicer") -> None:
        server = self._gate.server()
        service.add_to(Strict(server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            self._gate.bind(server, self._config.grpc_listen)
        except RuntimeError as error:
            raise RuntimeError(
                f"eldr cannot listen on {self._config.grpc_listen} (eldr.grpc_listen): {error}"
            ) from error
        await server.start()
        for name in ("", service.name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        self._tasks = [asyncio.create_task(self._keep_registered(router)) for router in self._config.routers]
        log.info("worker_services_started", address=self._config.grpc_listen, worker_id=self._info.worker_id)

    async def _stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace=0.5)

    async def _keep_registered(self, router: str) -> None:
        problem = ""
        async with RouterClient(router, caller=self._caller) as client:
            while True:
                try:
                    await client.register(self._info)
                    if problem:
                        log.info("worker_registered_again", router=router)
                    problem = ""
                except RouterError as error:
                    if error.detail != problem:
                        problem = error.detail or error.code.name
                        log.warning("worker_not_registered", router=router, code=error.code.name, why=problem)
                await asyncio.sleep(REGISTER_PERIOD_S)


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):  # type: ignore[misc]
    """`eldr.v1.PrefillService` over a PrefillHandoff."""

    name = "eldr.v1.PrefillService"

    def __init__(self, info: WorkerInfo, handoff: PrefillHandoff, kv_usage: Any) -> None:
        self._info = info
        self._handoff = handoff
        self._kv_usage = kv_usage
        self._watchers: set[asyncio.Queue[tuple[str, ExpertSignature]]] = set()
        self._dropped: dict[asyncio.Queue[tuple[str, ExpertSignature]], int] = {}

    def add_to(self, server: "grpc.aio.Server | Strict") -> None:
        """Registers the service."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    def publish(self, request_id: str, signature: ExpertSignature) -> None:
        """Hands a signature to every watcher. On the server's loop."""
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
                self._dropped[queue] += 1
            queue.put_nowait((request_id, signature))

    @property
    def watched(self) -> bool:
        """Whether anybody watches signatures."""
        return bool(self._watchers)

    async def GetInfo(self, request: Any, context: Any) -> prefill_pb2.PrefillServiceGetInfoResponse:  # noqa: N802
        return prefill_pb2.PrefillServiceGetInfoResponse(
            info=encode_worker_info(self._info), held_transfers=self._handoff.held, kv_usage=self._kv_usage()
        )

    async def GetSignature(self, request: Any, context: Any) -> prefill_pb2.GetSignatureResponse:  # noqa: N802
        signature = self._handoff.signature(request.transfer_id)
        if signature is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no signature of {request.transfer_id!r}: never complete, or gone"
            )
            raise AssertionError("abort raises")
        return prefill_pb2.GetSignatureResponse(signature=encode_signature(signature))

    async def WatchSignatures(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[prefill_pb2.WatchSignaturesResponse]:
        queue: asyncio.Queue[tuple[str, ExpertSignature]] = asyncio.Queue(WATCH_BACKLOG)
        self._watchers.add(queue)
        self._dropped[queue] = 0
        try:
            while True:
                transfer_id, signature = await queue.get()
                yield prefill_pb2.WatchSignaturesResponse(
                    transfer_id=transfer_id,
                    signature=encode_signature(signature),
                    dropped=self._dropped[queue],
                )
        finally:
            self._watchers.discard(queue)
            del self._dropped[queue]

    async def ReleaseTransfer(self, request: Any, context: Any) -> prefill_pb2.ReleaseTransferResponse:  # noqa: N802
        other_process = request.incarnation and request.incarnation != self._info.incarnation
        released = not other_process and self._handoff.ask_release(request.transfer_id)
        return prefill_pb2.ReleaseTransferResponse(released=released)

    async def ConfirmTransfer(self, request: Any, context: Any) -> prefill_pb2.ConfirmTransferResponse:  # noqa: N802
        other_process = request.incarnation and request.incarnation != self._info.incarnation
        intact = not other_process and self._handoff.transfers.confirm(request.transfer_id, request.reader_id)
        return prefill_pb2.ConfirmTransferResponse(intact=intact)


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):  # type: ignore[misc]
    """`eldr.v1.DecodeService` over a DecodeScheduler."""

    name = "eldr.v1.DecodeService"

    def __init__(
        self,
        info: WorkerInfo,
        config: EngineConfig,
        scheduler: DecodeScheduler,
        kept: Callable[[str], ExpertSignature | None] = lambda _reservation_id: None,
    ) -> None:
        self._info = info
        self._config = config
        self._scheduler = scheduler
        self._kept = kept
        self._sequence = itertools.count(1)
        self._watchers: set[asyncio.Event] = set()

    def add_to(self, server: "grpc.aio.Server | Strict") -> None:
        """Registers the service."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    def membership_changed(self) -> None:
        """Wakes the state streams. On the server's loop."""
        for event in self._watchers:
            event.set()

    def _state(self) -> decode_pb2.DecoderState:
        state = self._scheduler.snapshot(self._info.worker_id, self._info.incarnation, next(self._sequence))
        return encode_state(state)

    async def GetInfo(self, request: Any, context: Any) -> decode_pb2.DecodeServiceGetInfoResponse:  # noqa: N802
        return decode_pb2.DecodeServiceGetInfoResponse(info=encode_worker_info(self._info))

    async def GetState(self, request: Any, context: Any) -> decode_pb2.GetStateResponse:  # noqa: N802
        return decode_pb2.GetStateResponse(state=self._state())

    async def WatchState(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[decode_pb2.WatchStateResponse]:
        # Also what is no number at all, which would disorder the timers of the event loop.
        if not 0 <= request.period_s < math.inf:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"period_s must be finite and not negative, got {request.period_s:g}",
            )
        period = request.period_s or self._config.state_period_s
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield decode_pb2.WatchStateResponse(state=self._state())
                await asyncio.sleep(self._config.state_min_gap_s)
                try:
                    await asyncio.wait_for(changed.wait(), max(0.0, period - self._config.state_min_gap_s))
                except TimeoutError:
                    continue
        finally:
            self._watchers.discard(changed)

    async def GetDecodeCounts(self, request: Any, context: Any) -> decode_pb2.GetDecodeCountsResponse:  # noqa: N802
        signature = self._kept(request.reservation_id)
        if signature is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no decode counts of {request.reservation_id!r}: not asked for, not finished, or gone",
            )
            raise AssertionError("abort raises")
        return decode_pb2.GetDecodeCountsResponse(signature=encode_signature(signature))

    async def Drain(self, request: Any, context: Any) -> decode_pb2.DrainResponse:  # noqa: N802
        self._scheduler.draining = request.draining
        self.membership_changed()
        state = self._scheduler.snapshot(self._info.worker_id, self._info.incarnation, 0)
        return decode_pb2.DrainResponse(running=state.running, waiting=state.waiting)
