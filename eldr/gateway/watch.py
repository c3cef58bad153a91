"""Who waits for which worker, and an end to waits for a worker that is no longer there.

A stopped process and a cut network break no connection. So a worker for which somebody has waited `probe_after_s`
without a byte is asked for its health, once at a time whatever waits (case 7.6); after `PROBE_MISSES` questions without
an answer all such waits end. The router's verdict counts too: a wait for a dead worker ends once it has been silent
for `SILENT_S`, one for a process that has been replaced ends at once.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from eldr.client import FleetSnapshot, RouterError
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerLostError
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_status import WorkerHealth, WorkerRef, WorkerStatus

log = structlog.get_logger()

PROBE_MISSES = 2
"""Health checks in a row that must fail."""

SILENT_S = 2.0
"""Silence after which a wait for a worker ends that the router calls dead: a router may be cut off alone."""

TICK_S = 0.5
"""Pause between two looks at the waits."""

ROUTER_PAUSE_S = 1.0
"""Pause before a broken fleet stream is opened again."""


@dataclass(slots=True, eq=False)
class _Wait:
    scope: asyncio.Timeout
    since_s: float
    lost: str = ""

    def end(self, why: str) -> None:
        """Ends the wait through its own time limit."""
        if not self.lost and not self.scope.expired():
            self.lost = why
            self.scope.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True)
class _Watched:
    """The waits for one process of a worker. `asked_s` is when the last health check ended."""

    worker: WorkerRef
    waits: set[_Wait] = field(default_factory=set)
    misses: int = 0
    asked_s: float = 0.0
    probe: asyncio.Task[None] | None = None


class Watch:
    """The waits of one gateway. `probe` is a health check with a time limit of its own."""

    def __init__(
        self,
        probe: Callable[[WorkerRef], Awaitable[bool]],
        probe_after_s: float,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._probe = probe
        self._probe_after_s = probe_after_s
        self._counts = counts
        self._clock = clock
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._dead: set[str] = set()
        self._incarnations: dict[str, str] = {}

    @asynccontextmanager
    async def limit(self, worker: WorkerRef, seconds: float, what: str) -> AsyncIterator[None]:
        """A wait for an answer of a worker, `seconds` at most.

        Raises LegError with the outcome TIMEOUT when the time is over, WorkerLostError when the worker is gone.
        """
        key = (worker.worker_id, worker.incarnation)
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(worker)
        wait: _Wait | None = None
        try:
            async with asyncio.timeout(seconds) as scope:
                wait = _Wait(scope, self._clock())
                watched.waits.add(wait)
                yield
        except TimeoutError as error:
            if wait is not None and wait.lost:
                self._counts[Event.WORKER_LOST] += 1
                raise WorkerLostError(worker.worker_id, wait.lost) from error
            detail = f"{what} took longer than {seconds:g} s"
            raise LegError(worker.worker_id, detail, outcome=Outcome.TIMEOUT) from error
        finally:
            if wait is not None:
                watched.waits.discard(wait)
            if not watched.waits and watched.probe is None:
                self._watched.pop(key, None)

    async def run(self) -> None:
        """Looks after the waits until it is cancelled."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                self.look()
        finally:
            for watched in self._watched.values():
                if watched.probe is not None:
                    watched.probe.cancel()

    async def follow(self, fleet: Callable[[], AsyncIterator[FleetSnapshot]]) -> None:
        """Takes the router's view of the workers until it is cancelled."""
        while True:
            try:
                async for snapshot in fleet():
                    self.fleet(snapshot.workers)
            except RouterError as error:
                log.debug("fleet_stream_broken", error=str(error))
            self.fleet(())
            await asyncio.sleep(ROUTER_PAUSE_S)

    def fleet(self, workers: Iterable[WorkerStatus]) -> None:
        """The router's view. A worker that is not in it may still finish its answers: it was removed."""
        known = {worker.info.worker_id: worker for worker in workers}
        self._incarnations = {name: worker.info.incarnation for name, worker in known.items()}
        self._dead = {name for name, worker in known.items() if worker.health is WorkerHealth.DEAD}
        self.look()

    def look(self) -> None:
        """Ends the waits for workers that are gone and asks those that are silent."""
        now_s = self._clock()
        for (worker_id, incarnation), watched in self._watched.items():
            if self._incarnations.get(worker_id, incarnation) != incarnation:
                self._end(watched, "it was restarted", longer_than_s=0.0)
                continue
            if worker_id in self._dead:
                self._end(watched, "the router holds it for dead", longer_than_s=SILENT_S)
            silent = any(now_s - wait.since_s >= self._probe_after_s for wait in watched.waits)
            if not silent:
                watched.misses = 0
            elif watched.probe is None and (watched.misses or now_s - watched.asked_s >= self._probe_after_s):
                watched.probe = asyncio.ensure_future(self._ask(watched))

    async def _ask(self, watched: _Watched) -> None:
        try:
            alive = await self._probe(watched.worker)
        finally:
            watched.probe = None
            if not watched.waits:
                self._watched.pop((watched.worker.worker_id, watched.worker.incarnation), None)
        watched.asked_s = self._clock()
        watched.misses = 0 if alive else watched.misses + 1
        if watched.misses >= PROBE_MISSES:
            watched.misses = 0
            log.warning("worker_lost", worker=watched.worker.worker_id, waits=len(watched.waits))
            self._end(watched, "it answers no health check", longer_than_s=self._probe_after_s)

    def _end(self, watched: _Watched, why: str, longer_than_s: float) -> None:
        now_s = self._clock()
        for wait in watched.waits:
            if now_s - wait.since_s >= longer_than_s:
                wait.end(why)
