"""TCP links through the test process: they forward, hold back, or are cut, and know what they hold."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from eldr.cluster.ports import LOOPBACK

CHUNK_BYTES = 65_536

T = TypeVar("T")


class Gate:
    """Lets bytes through while it is open; `held` counts the pieces that wait at it."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.held = 0

    async def passed(self) -> None:
        if self._open.is_set():
            return
        self.held += 1
        try:
            await self._open.wait()
        finally:
            self.held -= 1

    def set(self, is_open: bool) -> None:
        if is_open:
            self._open.set()
        else:
            self._open.clear()


class Link:
    """One port in front of another. A cut link swallows everything, as a network does that is gone."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port = port
        self.requests = Gate()
        self.answers = Gate()
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port)

    def hold(self, *, requests: bool = False, answers: bool = False) -> None:
        """Holds the bytes of either direction back from now on, or lets them go."""
        self.requests.set(not requests)
        self.answers.set(not answers)

    def heal(self) -> None:
        """Ends a cut: connections that stood during it are reset, new ones pass."""
        for writer in self._writers:
            writer.transport.abort()
        self.hold()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(LOOPBACK, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._writers |= ends
        try:
            pumps = [
                asyncio.ensure_future(_pump(reader, back, self.requests)),
                asyncio.ensure_future(_pump(there, writer, self.answers)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= ends
            for end in ends:
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate) -> None:
    """Ends with the connection that it reads, or that it writes."""
    while True:
        try:
            data = await reader.read(CHUNK_BYTES)
            if not data:
                return
            await gate.passed()
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            return


class Links:
    """Links on an event loop and a thread of their own, so that no test's loop delays them. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._links: list[Link] = []

    def __enter__(self) -> "Links":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def add(self, port: int, target_port: int) -> Link:
        """A link that is open when this returns."""
        link = self._call(lambda: Link(port, target_port))
        self._run(link.open())
        self._links.append(link)
        return link

    def hold(self, link: Link, *, requests: bool = False, answers: bool = False) -> None:
        self._call(lambda: link.hold(requests=requests, answers=answers))

    def heal(self, link: Link) -> None:
        self._call(link.heal)

    def _call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self._run(run())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
