"""A core with a fake clock and plausible workers, and a served router with its client."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import numpy as np

from eldr.calibration.fit_record import ClusterRecord, Provenance
from eldr.calibration.profile import Profile
from eldr.client import RouterClient
from eldr.router.core import RouterCore
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.routing.contract import DecodeRequest
from eldr.routing.state import DecoderState
from eldr.rpc.settings import channel_options
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.clock import FakeClock
from eldr.testing.fake_services import FakeWorker, fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature


class CoreRig:
    """A core, its clock, and reports as its decoders would send them."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.core = RouterCore(RouterSettings(**settings), clock=self.clock)
        self._sequence = 0

    def join(self, *worker_ids: str, **info: Any) -> None:
        """d... decodes and has reported once, p... prefills."""
        for worker_id in worker_ids:
            role = WorkerRole.DECODE if worker_id.startswith("d") else WorkerRole.PREFILL
            self.core.register(fake_info(worker_id, role, **info))
            if role is WorkerRole.DECODE:
                self.report(worker_id)

    def report(self, worker_id: str, **changes: Any) -> Any:
        self._sequence += 1
        fields: dict[str, Any] = {"incarnation": f"{worker_id}-1", "sequence": self._sequence} | changes
        return self.core.report(DecoderState(worker_id, **fields))

    def reserve(
        self, reservation_id: str = "", signature: ExpertSignature | None = None, **query: Any
    ) -> str:
        asked = DecodeRequest(reservation_id, signature or fake_signature(), **query)
        return self.core.reserve_decode(asked).worker.worker_id

    def loads(self) -> dict[str, int]:
        return {status.info.worker_id: status.bookings for status in self.core.workers()}


@contextlib.asynccontextmanager
async def served(
    settings: RouterSettings | None = None, *workers: FakeWorker
) -> AsyncIterator[tuple[RouterServer, RouterClient]]:
    """A router on a free port that looks for these workers, which are started here, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        settings = settings or RouterSettings()
        addresses = (*settings.workers, *(worker.address for worker in workers))
        server = RouterServer(dataclasses.replace(settings, workers=addresses))
        port = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, grace_s=0.1)
        yield server, await stack.enter_async_context(RouterClient(f"127.0.0.1:{port}"))


@contextlib.asynccontextmanager
async def raw_channel(client: RouterClient) -> AsyncIterator[grpc.aio.Channel]:
    """A channel beside the client, for messages that it would not send."""
    async with grpc.aio.insecure_channel(client.addresses[0], options=channel_options()) as channel:
        yield channel


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """The address of a server that accepts connections and never says a word."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def fake_profile(clusters: int = 2, **changes: Any) -> Profile:
    """A profile of the fake model with random centroids."""
    rng = np.random.default_rng(0)
    centroids = rng.random((clusters, FAKE_GEOMETRY.layers * FAKE_GEOMETRY.experts)).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    fields: dict[str, Any] = {
        "fingerprint": FAKE_GEOMETRY.fingerprint,
        "moe_layers": FAKE_GEOMETRY.moe_layers,
        "experts": FAKE_GEOMETRY.experts,
        "top_k": FAKE_GEOMETRY.top_k,
        "transform": "count",
        "idf": np.ones(FAKE_GEOMETRY.shape, np.float32),
        "layer_mask": (0, 1),
        "centroids": centroids,
        "quality": (),
        "clustering": ClusterRecord((1,) * clusters, True, 0.9, 1, True, clusters),
        "provenance": Provenance("fake", 2, "2026-01-01T00:00:00+00:00", "0", 0),
    }
    return Profile(**(fields | changes))


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> float:
    """Seconds until a condition holds; fails after `limit_s`."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < limit_s, f"not within {limit_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - begun_s
