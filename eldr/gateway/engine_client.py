"""HTTP to the workers: pooled connections, and every failure as a LegError that says whether it was reached."""

import errno
import ssl
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp

from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerRefusalError
from eldr.gateway.settings import GatewaySettings
from eldr.rpc.outcome import Outcome
from eldr.rpc.security import Tls
from eldr.rpc.worker_status import WorkerRef

POOL_KEEPALIVE_S = 4.0
"""How long an idle connection is kept: less than the 5 s after which vLLM's server closes it."""

PROBE_TIMEOUT_S = 5.0
"""How long a worker may take to answer a health check."""

_TRANSPORT = (aiohttp.ClientError, OSError)


class EngineClient:
    """Posts legs. Made on the loop it runs on; `close` ends every connection.

    The connections to one worker are bounded, those to all together are not, so that a worker that never
    answers takes no connection away from another one (case 3.14).
    """

    def __init__(self, settings: GatewaySettings, counts: Counts, tls: Tls | None = None) -> None:
        self._settings = settings
        self._counts = counts
        self._tls = tls
        self._pool = self._session(keepalive_timeout=POOL_KEEPALIVE_S)
        self._fresh = self._session(force_close=True)

    def _session(self, **options: Any) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        trace.on_connection_queued_start.append(_note_queued)
        trace.on_connection_queued_end.append(_note_turn)
        connector = aiohttp.TCPConnector(
            limit=0, limit_per_host=self._settings.connections_per_worker, **options
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
        )

    def _checks(self) -> ssl.SSLContext | bool:
        """How the certificate of an https worker is checked: by `tls`, or by the system's authorities."""
        return True if self._tls is None else self._tls.client_context()

    async def close(self) -> None:
        """Closes the pools; legs in flight fail."""
        await self._pool.close()
        await self._fresh.close()

    async def post(
        self, worker: WorkerRef, path: str, body: bytes, headers: Mapping[str, str], connect_timeout_s: float
    ) -> aiohttp.ClientResponse:
        """Sends a leg and waits for the head of a 2xx answer. The caller closes the response.

        Raises WorkerRefusalError on a 4xx and LegError on everything else.
        """
        response = await self._send(worker, path, body, headers, connect_timeout_s)
        if response.status in range(200, 300):
            return response
        try:
            raise await _judge(worker, response)
        finally:
            response.close()

    async def alive(self, worker: WorkerRef) -> bool:
        """Whether a worker answers its health check with anything but a 5xx, within `PROBE_TIMEOUT_S`."""
        try:
            async with self._fresh.get(
                worker.http_url.rstrip("/") + "/health",
                timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S),
                allow_redirects=False,
                ssl=self._checks(),
                trace_request_ctx=SimpleNamespace(reused=False, queued=False),
            ) as response:
                return response.status < 500
        except (*_TRANSPORT, TimeoutError):
            return False

    async def _send(
        self, worker: WorkerRef, path: str, body: bytes, headers: Mapping[str, str], connect_timeout_s: float
    ) -> aiohttp.ClientResponse:
        """A kept connection that the worker has just closed says nothing about the worker: one more try."""
        use = SimpleNamespace(reused=False, queued=False)
        try:
            return await _post(
                self._pool, worker, path, body, headers, connect_timeout_s, use, self._checks()
            )
        except LegError as error:
            self._counts[Event.WORKER_FULL] += use.queued
            if not (use.reused and error.reached and error.retryable):
                raise
        self._counts[Event.CONNECTION_RETRIED] += 1
        return await _post(self._fresh, worker, path, body, headers, connect_timeout_s, use, self._checks())


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _note_queued(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
    context.trace_request_ctx.queued = True


async def _note_turn(_session: aiohttp.ClientSession, context: Any, _params: object) -> None:
    context.trace_request_ctx.queued = False


async def _post(
    session: aiohttp.ClientSession,
    worker: WorkerRef,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    connect_timeout_s: float,
    use: SimpleNamespace,
    checks: ssl.SSLContext | bool,
) -> aiohttp.ClientResponse:
    try:
        return await session.post(
            worker.http_url.rstrip("/") + path,
            data=body,
            headers={**headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout_s),
            allow_redirects=False,
            ssl=checks,
            trace_request_ctx=use,
        )
    except aiohttp.ConnectionTimeoutError as error:
        if not use.queued:
            raise transport_error(worker.worker_id, error) from error
        raise LegError(
            worker.worker_id,
            "all connections to it are in use",
            outcome=Outcome.BACKPRESSURE,
            reached=False,
            retryable=True,
        ) from error
    except _TRANSPORT as error:
        raise transport_error(worker.worker_id, error) from error


def transport_error(worker_id: str, error: BaseException) -> LegError:
    """A failed connection as a LegError. Only a connection that never stood is surely not `reached`."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        detail = "the gateway has no file descriptor left for a connection to it"
        return LegError(worker_id, detail, outcome=Outcome.ABANDONED, reached=False)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return LegError(
            worker_id, "no connection in time", outcome=Outcome.TIMEOUT, reached=False, retryable=True
        )
    detail = str(error) or type(error).__name__
    reached = not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.InvalidURL))
    return LegError(worker_id, detail, outcome=Outcome.WORKER_ERROR, reached=reached, retryable=True)


async def read_all(worker_id: str, response: aiohttp.ClientResponse) -> bytes:
    """The body of an answer. Raises LegError where the connection breaks."""
    try:
        return await response.read()
    except _TRANSPORT as error:
        raise transport_error(worker_id, error) from error


async def _judge(worker: WorkerRef, response: aiohttp.ClientResponse) -> LegError | WorkerRefusalError:
    status = response.status
    body = await read_all(worker.worker_id, response)
    if status in (429, 503):
        return LegError(
            worker.worker_id, f"HTTP {status}, it is full", outcome=Outcome.BACKPRESSURE, retryable=True
        )
    if status in range(400, 500):
        return WorkerRefusalError(worker.worker_id, status, body, response.content_type)
    detail = f"HTTP {status}: {body[:500].decode('utf-8', 'replace')}"
    return LegError(worker.worker_id, detail, outcome=Outcome.WORKER_ERROR, retryable=status in (502, 504))
