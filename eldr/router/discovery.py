"""Addresses of workers out of DNS: the records of a headless service, read again and again.

A record says where to look for a worker, nothing more. One that vanishes ends the search there; a worker that has
been found lives and dies by its own signs of life.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Self

import structlog

from eldr.router.counters import Counters

log = structlog.get_logger()

SCHEME = "dns:///"
RESOLVE_TIMEOUT_S = 5.0

Resolver = Callable[[str, int], Awaitable[Iterable[str]]]
"""Name and port to host:port addresses. Raises OSError where the name has none."""


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name whose A and AAAA records are workers, and the port of their gRPC services."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Out of `dns:///name:port`. Raises ValueError."""
        name, _, port = text.removeprefix(SCHEME).rpartition(":")
        plain = name and not set(name) & set("/:[] ")
        if not (text.startswith(SCHEME) and plain and port.isdigit() and 0 < int(port) < 1 << 16):
            raise ValueError(f"discover must be {SCHEME}NAME:PORT, got {text!r}")
        return cls(name, int(port))

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}:{self.port}"


async def resolve(name: str, port: int) -> set[str]:
    """Asks the system's resolver for the A and AAAA records of a name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }


class DnsDiscovery:
    """Looks a name up every `period_s`, and calls `search` and `give_up` with addresses that come and go.

    A look-up that fails changes nothing: it is counted in `eldr_discovery_errors_total{host}`, and what was found
    before still stands.
    """

    def __init__(
        self,
        target: DnsName,
        search: Callable[[str], None],
        give_up: Callable[[str], None],
        counters: Counters,
        period_s: float,
        resolver: Resolver = resolve,
    ) -> None:
        self.target = target
        self.found: frozenset[str] = frozenset()
        self._search = search
        self._give_up = give_up
        self._counters = counters
        self._period_s = period_s
        self._resolver = resolver
        self._problem = ""

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.look_up()
            await asyncio.sleep(self._period_s)

    async def look_up(self) -> None:
        """One look-up."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = frozenset(await self._resolver(self.target.name, self.target.port))
        except OSError as error:  # TimeoutError is one.
            self._counters.add("eldr_discovery_errors_total", host=self.target.name)
            problem = str(error) or f"no answer within {RESOLVE_TIMEOUT_S:g} s"
            if problem != self._problem:
                log.warning("discovery_failed", target=str(self.target), why=problem)
            self._problem = problem
            return
        self._problem = ""
        if found != self.found:
            log.info("discovery_changed", target=str(self.target), addresses=sorted(found))
        gone, self.found = self.found - found, found
        for address in sorted(gone):
            self._give_up(address)
        for address in sorted(found):
            self._search(address)
