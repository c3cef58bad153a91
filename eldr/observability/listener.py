"""`/metrics` of a process that has no HTTP server of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from eldr.observability.series import Catalogue, Sample

READ_LIMIT_S = 5.0


class MetricsListener:
    """Serves the samples that `read` gives, on a thread of its own; `read` runs on the loop that made this.

    Raises OSError where the address cannot be bound.
    """

    def __init__(
        self, host: str, port: int, catalogue: Catalogue, read: Callable[[], Iterable[Sample]]
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(catalogue, read, asyncio.get_running_loop()))
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, host, registry)

    @property
    def port(self) -> int:
        """The port that is bound."""
        return int(self._server.server_port)

    async def close(self) -> None:
        """Stops serving; a scrape that runs still gets its answer."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        await asyncio.to_thread(self._thread.join)


class _OnLoop(Collector):
    def __init__(
        self, catalogue: Catalogue, read: Callable[[], Iterable[Sample]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._catalogue = catalogue
        self._read = read
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        async def families() -> list[Metric]:
            return self._catalogue.families(self._read())

        return asyncio.run_coroutine_threadsafe(families(), self._loop).result(READ_LIMIT_S)
