"""The router as a process: gRPC server, health, links to the workers, shutdown."""

import asyncio
import time
from collections.abc import Callable, Coroutine

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as aio_health  # type: ignore[attr-defined]
from grpc_reflection.v1alpha import reflection

from eldr.calibration.profile import Profile
from eldr.router.core import Clock, RouterCore
from eldr.router.discovery import DnsDiscovery, DnsName, Resolver, resolve
from eldr.router.links import Links
from eldr.router.refit import LiveFit
from eldr.router.service import FleetServicer, ProfileServicer, RouterServicer
from eldr.router.settings import RouterSettings
from eldr.rpc.calling import Caller
from eldr.rpc.serving import Gate
from eldr.rpc.strict import Strict
from eldr.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc

log = structlog.get_logger()

TICK_S = 0.25
"""How often bookings expire and health is noted."""


class ListenError(RuntimeError):
    """The address cannot be bound."""


class RouterServer:
    """One router. `start` and `stop` once each, on one event loop.

    `gate` says who gets in, `caller` how the router itself calls the workers.
    """

    def __init__(
        self,
        settings: RouterSettings,
        profile: Profile | None = None,
        clock: Clock = time.monotonic,
        gate: Gate | None = None,
        caller: Caller | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        self.core = RouterCore(settings, profile, clock)
        self.live_fit = LiveFit(self.core)
        self._clock = clock
        self._gate = gate or Gate()
        self._resolver = resolver
        self._links = Links(self.core, caller or Caller())
        self._health = aio_health.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, listen: str) -> int:
        """Binds host:port (0: any free port), serves, and returns the port. Raises ListenError."""
        server = self._gate.server()
        services: list[tuple[Callable[..., None], object]] = [
            (routing_pb2_grpc.add_RouterServiceServicer_to_server, RouterServicer(self.core)),
            (fleet_pb2_grpc.add_FleetServiceServicer_to_server, FleetServicer(self.core)),
            (
                routing_pb2_grpc.add_ProfileServiceServicer_to_server,
                ProfileServicer(self.core, self.live_fit),
            ),
        ]
        for add, servicer in services:
            add(servicer, Strict(server))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self.core.settings.reflection:
            reflection.enable_server_reflection([*_service_names(), reflection.SERVICE_NAME], server)
        try:
            port = self._gate.bind(server, listen)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {listen}: {error}") from error
        await server.start()
        self._server = server
        for address in self.core.settings.workers:
            self._links.search(address)
        self._tasks = [
            asyncio.create_task(work) for work in (self._tick(), self._keep_links(), *self._discoveries())
        ]
        for name in ("", *_service_names()):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        log.info("router_started", listen=listen, port=port, policy=self.core.settings.policy)
        return port

    async def stop(self, notice_s: float = 0.0, grace_s: float = 1.0) -> None:
        """Says NOT_SERVING, goes on serving for `notice_s`, then ends streams, links and the server."""
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(notice_s)
        self.core.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._links.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        self.live_fit.close()
        log.info("router_stopped")

    async def _tick(self) -> None:
        while True:
            self.core.tick()
            self.live_fit.tick(self._clock())
            await asyncio.sleep(TICK_S)

    def _discoveries(self) -> list[Coroutine[None, None, None]]:
        settings, links = self.core.settings, self._links
        return [
            DnsDiscovery(
                DnsName.parse(text),
                links.search,
                links.give_up,
                self.core.counters,
                settings.discover_period_s,
                self._resolver,
            ).run()
            for text in settings.discover
        ]

    async def _keep_links(self) -> None:
        with self.core.changes.subscribe() as changes:
            self._links.sync()
            async for _ in changes:
                self._links.sync()


def _service_names() -> list[str]:
    routing, fleet = routing_pb2.DESCRIPTOR.services_by_name, fleet_pb2.DESCRIPTOR.services_by_name
    return [service.full_name for service in (*routing.values(), *fleet.values())]
