"""The HTTP server: routes, answers, readiness, the end of a process."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web

from eldr.client import RouterError, WorkerHealth, WorkerRole, WorkerStatus
from eldr.gateway.access import ApiKeys
from eldr.gateway.admission import Admission, AdmissionLimits
from eldr.gateway.big_bodies import BodyParser
from eldr.gateway.bookings import Releases
from eldr.gateway.coordinator import Coordinator
from eldr.gateway.counters import Event
from eldr.gateway.course import Answer
from eldr.gateway.errors import GatewayError, error_body, from_router, unavailable
from eldr.gateway.headers import domain_of, echoed_id, forwarded, tenant_of, timeout_of
from eldr.gateway.legs import ClientRequest, Endpoint
from eldr.gateway.metrics import GATEWAY, GatewayMetrics
from eldr.gateway.passing import PASSED_ROUTES
from eldr.gateway.settings import GatewaySettings
from eldr.observability.series import CONTENT_TYPE, exposition
from eldr.rpc.security import Tls, warn_where_open

log = structlog.get_logger()

SETTLE_S = 10.0
"""How long a stopping gateway waits for releases of workers and routers that do not answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayServer:
    """One listening gateway. `start`, then `stop`; both on the loop that serves."""

    def __init__(
        self,
        coordinator: Coordinator,
        releases: Releases,
        settings: GatewaySettings,
        version: str,
        keys: ApiKeys | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._keys = keys or ApiKeys()
        self._tls = tls
        self._coordinator = coordinator
        self._releases = releases
        self._counts = releases.counts
        self._settings = settings
        self._admission = Admission(
            AdmissionLimits(
                settings.max_requests,
                settings.max_waiting,
                settings.tenant_requests,
                settings.tenant_waiting,
                settings.queue_timeout_s,
            ),
            self._counts,
        )
        self._bodies = BodyParser(self._counts, settings.ordinary_fallback)
        self._metrics = GatewayMetrics(self._counts)
        self._version_name = version
        self._created = int(time.time())
        self._requests: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._hurry = asyncio.Event()
        self._draining = False
        self._cutting = False
        self._runner: web.AppRunner | None = None
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> str:
        """Listens and returns the address as host:port. Raises OSError where it cannot."""
        app = web.Application(
            client_max_size=self._settings.max_body_bytes, middlewares=[self._errors_as_json]
        )
        for endpoint in Endpoint:
            app.router.add_post(endpoint, self._generate)
        for route in PASSED_ROUTES:
            app.router.add_post(route, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._exported)
        # Without handler_cancellation a client that leaves would be noticed at the next write only.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        warn_where_open(f"{host}:{port}", self._tls, self._keys.checked)
        context = None if self._tls is None else self._tls.server_context()
        site = web.TCPSite(self._runner, host, port, ssl_context=context)
        await site.start()
        watch = self._coordinator.watch
        self._keepers = [
            asyncio.ensure_future(watch.run()),
            asyncio.ensure_future(watch.follow(self._releases.router.watch_fleet)),
        ]
        bound = self._runner.addresses[0]
        return f"{bound[0]}:{bound[1]}"

    async def stop(self, grace_s: float) -> None:
        """Not ready at once, running requests within `grace_s` seconds, then an error event; gives all back."""
        self._draining = True
        log.info("draining", requests=len(self._requests), grace_s=grace_s)
        ends = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._hurry)]
        await asyncio.wait(ends, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        self._cutting = True
        for task in list(self._requests):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._releases.settled()
        except TimeoutError:
            log.warning("releases_unfinished", after_s=SETTLE_S)
        self._bodies.close()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        log.info("stopped", counts={str(name): count for name, count in self._counts.items() if count})

    def hurry(self) -> None:
        """Ends the grace time of a `stop` that is running."""
        self._hurry.set()

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._keys.require(request)
            response = await handler(request)
        except GatewayError as error:
            response = _error_response(error)
        except web.HTTPClientError as error:
            message = f"{request.method} {request.path}: {error.reason}"
            response = _error_response(GatewayError(error.status, message))
        if not response.prepared:
            self._close_if_crowded(response)
        return response

    def _close_if_crowded(self, response: web.StreamResponse) -> None:
        """Idle connections of clients must not take the file descriptors of those that have work (case 7.5)."""
        server = self._runner.server if self._runner else None
        if server is not None and len(server.connections) > self._settings.max_requests:
            response.force_close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """A generation request, counted as running until its last byte is written."""
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        self._idle.clear()
        request_id = echoed_id(request.headers)
        began = time.monotonic()
        status = 0
        try:
            response = await self._respond(request, request_id, began)
            status = response.status
            return response
        except GatewayError as error:
            status = error.status
            self._counts[Event.REQUEST_REFUSED] += status < 500
            response = _error_response(error)
            response.headers["x-request-id"] = request_id
            return response
        except asyncio.CancelledError:
            if self._cutting:
                status = 503
                return _error_response(unavailable("the gateway is shutting down"))
            self._counts[Event.CLIENT_GONE] += 1
            raise
        except ConnectionResetError:
            self._counts[Event.CLIENT_GONE] += 1
            raise
        finally:
            self._requests.discard(task)
            if not self._requests:
                self._idle.set()
            elapsed_s = round(time.monotonic() - began, 4)
            self._metrics.finished(request.path, status, elapsed_s)
            log.info("request_finished", request=request_id, path=request.path, status=status, s=elapsed_s)

    async def _respond(self, request: web.Request, request_id: str, began: float) -> web.StreamResponse:
        if self._draining:
            raise unavailable("the gateway is shutting down")
        tenant = tenant_of(request.headers, self._settings.tenant_header)
        timeout_s = timeout_of(request.headers)
        ends_s = math.inf if timeout_s is None else self._coordinator.now_s() + timeout_s
        if request.path in PASSED_ROUTES:
            async with self._admission.turn(tenant, timeout_s):
                return await self._pass_on(request, request_id, timeout_s)
        async with (
            self._admission.turn(tenant, timeout_s),
            self._coordinator.answer(await self._checked(request, request_id, ends_s)) as answer,
        ):
            headers = {**answer.headers, "x-request-id": request_id}
            if isinstance(answer.body, bytes):
                headers["Content-Type"] = answer.content_type
                return web.Response(status=answer.status, headers=headers, body=answer.body)
            self._metrics.first_event(time.monotonic() - began)
            return await self._stream(request, answer, headers)

    async def _pass_on(
        self, request: web.Request, request_id: str, timeout_s: float | None
    ) -> web.StreamResponse:
        raw = await self._read(request)
        shown = self._keys.for_engines(forwarded(request.headers))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._coordinator.pass_on.answer(request.path, raw, shown)
        except RouterError as error:
            raise from_router(error) from error
        except TimeoutError as error:
            raise GatewayError(504, "the request took longer than its deadline") from error
        assert isinstance(answer.body, bytes)
        headers = {"x-request-id": request_id, "Content-Type": answer.content_type}
        return web.Response(status=answer.status, headers=headers, body=answer.body)

    async def _checked(self, request: web.Request, request_id: str, ends_s: float) -> ClientRequest:
        endpoint, domain = Endpoint(request.path), domain_of(request.headers)
        parsed = await self._bodies.parse(endpoint, await self._read(request))
        return ClientRequest(
            endpoint=endpoint,
            body=parsed.body,
            raw=parsed.raw,
            prefix=parsed.prefix,
            request_id=request_id,
            domain=domain,
            headers=self._keys.for_engines(forwarded(request.headers)),
            ends_s=ends_s,
            ordinary=parsed.ordinary,
        )

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.read_timeout_s):
                return await request.read()
        except TimeoutError as error:
            limit_s = self._settings.read_timeout_s
            raise GatewayError(408, f"the body was not complete within {limit_s:g} s") from error
        except web.HTTPRequestEntityTooLarge as error:
            limit = self._settings.max_body_bytes
            raise GatewayError(413, f"the body is larger than {limit} bytes, the limit here") from error

    async def _stream(
        self, request: web.Request, answer: Answer, headers: dict[str, str]
    ) -> web.StreamResponse:
        assert not isinstance(answer.body, bytes)
        headers |= {"Content-Type": f"{answer.content_type}; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(status=answer.status, headers=headers)
        self._close_if_crowded(response)
        await response.prepare(request)
        try:
            async for block in answer.body:
                await response.write(block)
        except asyncio.CancelledError:
            if not self._cutting:
                raise
            self._counts[Event.STREAM_CUT_AT_SHUTDOWN] += 1
            message = "the gateway is shutting down, the stream was cut"
            await response.write(b"data: " + error_body(503, message) + b"\n\n")
        await response.write_eof()
        return response

    async def _models(self, _request: web.Request) -> web.Response:
        """The models of the fleet, as OpenAI model cards."""
        cards: dict[str, dict[str, Any]] = {}
        for worker in await self._fleet():
            if worker.reason:
                continue
            info = worker.info
            card = cards.setdefault(
                info.served_model,
                {
                    "id": info.served_model,
                    "object": "model",
                    "created": self._created,
                    "owned_by": "eldr",
                    "max_model_len": info.max_model_len,
                },
            )
            card["max_model_len"] = min(card["max_model_len"], info.max_model_len)
        return web.json_response({"object": "list", "data": list(cards.values())})

    async def _health(self, _request: web.Request) -> web.Response:
        """200 where a request could be served now, else 503 with the reason."""
        if self._draining:
            raise unavailable("the gateway is shutting down")
        fleet = await self._fleet()
        ready = {role: sum(_takes_work(worker, role) for worker in fleet) for role in WorkerRole}
        missing = [str(role) for role, count in ready.items() if not count]
        if missing:
            raise unavailable(f"no live worker of the role {' and '.join(missing)}")
        return web.json_response({"status": "ok", **{str(role): count for role, count in ready.items()}})

    async def _exported(self, _request: web.Request) -> web.Response:
        samples = self._metrics.samples(self._admission.running, self._admission.waiting)
        return web.Response(body=exposition(GATEWAY, samples), headers={"Content-Type": CONTENT_TYPE})

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._version_name})

    async def _fleet(self) -> list[WorkerStatus]:
        try:
            return await self._releases.router.workers()
        except RouterError as error:
            raise from_router(error) from error


def _takes_work(worker: WorkerStatus, role: WorkerRole) -> bool:
    return worker.info.role is role and worker.health is WorkerHealth.LIVE and not worker.reason


def _error_response(error: GatewayError) -> web.Response:
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s > 0 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=headers
    )
