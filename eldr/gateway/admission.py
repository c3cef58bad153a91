"""Who may run now: bounded queues, a share for each tenant, turns taken round the tenants."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import GatewayError, too_many


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Requests that run and wait at a time, in all and of one tenant; `wait_s` is the longest wait in seconds."""

    running: int
    waiting: int
    tenant_running: int
    tenant_waiting: int
    wait_s: float


class Admission:
    """The turns of one gateway.

    A request runs at once where there is room in all and for its tenant, else it waits in the tenant's queue. Room
    that becomes free goes round the tenants with requests waiting, so that one tenant's flood delays another tenant
    by one request and not by its queue.
    """

    def __init__(self, limits: AdmissionLimits, counts: Counts) -> None:
        self._limits = limits
        self._counts = counts
        self._running: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def turn(self, tenant: str, within_s: float | None = None) -> AsyncIterator[None]:
        """A turn for one request; `within_s` shortens the longest wait.

        Raises GatewayError 429 with Retry-After where a queue is full or the wait too long.
        """
        if self._has_room(tenant) and tenant not in self._queues:
            self._start(tenant)
        else:
            await self._wait(tenant, within_s)
        try:
            yield
        finally:
            self._end(tenant)

    def _has_room(self, tenant: str) -> bool:
        return self.running < self._limits.running and self._running[tenant] < self._limits.tenant_running

    def _start(self, tenant: str) -> None:
        self.running += 1
        self._running[tenant] += 1

    def _end(self, tenant: str) -> None:
        self.running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while self._start_next():
            pass

    async def _wait(self, tenant: str, within_s: float | None) -> None:
        queue = self._queues.get(tenant, deque())
        if self.waiting >= self._limits.waiting:
            raise self._refused(f"the gateway is full, {self.waiting} requests wait")
        if len(queue) >= self._limits.tenant_waiting:
            raise self._refused(f"too many requests of one client at a time, {len(queue)} wait")
        self._queues[tenant] = queue
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self.waiting += 1
        self._counts[Event.REQUEST_QUEUED] += 1
        limit_s = self._limits.wait_s if within_s is None else min(within_s, self._limits.wait_s)
        try:
            async with asyncio.timeout(limit_s):
                await turn
        except TimeoutError as error:
            self._leave(tenant, turn)
            raise self._refused(f"no turn within {limit_s:g} s, {self.waiting} requests wait") from error
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise

    def _leave(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        """Gives up a wait; a turn that was given at the same moment goes on to the next one."""
        queue = self._queues.get(tenant, deque())
        if turn.done() and not turn.cancelled():
            self._end(tenant)
        elif turn in queue:
            queue.remove(turn)
            self.waiting -= 1
            if not queue:
                del self._queues[tenant]

    def _start_next(self) -> bool:
        """Gives one turn to the tenant that waited longest for one and has room; False where there is none."""
        for tenant, queue in self._queues.items():
            if not self._has_room(tenant):
                continue
            turn = queue.popleft()
            self.waiting -= 1
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            if not turn.cancelled():
                self._start(tenant)
                turn.set_result(None)
            return True
        return False

    def _refused(self, message: str) -> GatewayError:
        self._counts[Event.REQUEST_SHED] += 1
        return too_many(message)
