"""Which workers get no request for a while, by how their last legs ended. Pure: the clock is passed in.

A worker's breaker opens after `breaker_failures` failures in a row, for `breaker_open_s` seconds, doubled at each
failed probe up to `MAX_OPEN_FACTOR` times that. Then one request at a time goes there as a probe: a success closes
the breaker, a failure opens it again, an answer that says nothing about the worker lets the next probe go.

What counts: a timeout or a broken connection is a failure, and so is an error that a worker answers with. But an
answered error may be the request's own doing, so such errors open breakers of at most half of the known workers of
the role: one client cannot take the fleet out, and one broken worker that fails fast does not draw the traffic.
Full workers, refused requests and clients that leave say nothing (cases 3.12, 3.13).
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from eldr.rpc.worker_info import WorkerRole

MAX_OPEN_FACTOR = 8
"""Longest time that a breaker is open, in multiples of the first."""

MAX_WORKERS = 4096
"""Workers that are remembered; the least recently asked is forgotten first."""


class Fault(Enum):
    """What a failed leg says about its worker."""

    NONE = auto()
    SILENT = auto()
    """No answer: a timeout, a broken or refused connection, a gateway status in front of the worker."""
    GONE = auto()
    """It answers no health check either: one such failure opens its breaker."""
    ANSWERED = auto()
    """The worker is there and says that it failed: 500, an error in an HTTP 200."""


@dataclass(slots=True)
class _Breaker:
    """`open_until_s` is 0 while closed; past it the breaker is half-open."""

    role: WorkerRole
    incarnation: str
    failures: int = 0
    open_until_s: float = 0.0
    open_s: float = 0.0
    probing: bool = False

    @property
    def is_closed(self) -> bool:
        return self.open_until_s == 0.0

    def bars(self, now_s: float) -> bool:
        """Whether no further request may go there now."""
        return not self.is_closed and (now_s < self.open_until_s or self.probing)


class Breakers:
    """One breaker for each worker. `clock` gives seconds of any monotonic clock."""

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._failures = failures
        self._open_s = open_s
        self._clock = clock
        self._workers: OrderedDict[str, _Breaker] = OrderedDict()

    def excluded(self) -> set[str]:
        """Ids of the workers that a request must not be sent to now."""
        now_s = self._clock()
        return {worker_id for worker_id, breaker in self._workers.items() if breaker.bars(now_s)}

    def admit(self, worker_id: str, incarnation: str, role: WorkerRole) -> "Ticket | None":
        """Lets a leg go there, or None where none may. A new incarnation begins with a closed breaker."""
        breaker = self._workers.get(worker_id)
        if breaker is None or breaker.incarnation != incarnation:
            breaker = self._workers[worker_id] = _Breaker(role, incarnation)
        self._workers.move_to_end(worker_id)
        while len(self._workers) > MAX_WORKERS:
            self._workers.popitem(last=False)
        if breaker.bars(self._clock()):
            return None
        breaker.probing = not breaker.is_closed
        return Ticket(self, breaker, probes=breaker.probing)

    def fail(self, breaker: _Breaker, fault: Fault, probes: bool) -> bool:
        """A leg failed. True where the breaker opened by it."""
        breaker.failures += self._failures if fault is Fault.GONE else 1
        if not (probes or (breaker.is_closed and breaker.failures >= self._failures)):
            return False
        if fault is Fault.ANSWERED and not probes and not self._may_open_one_more(breaker.role):
            return False
        breaker.open_s = min(2 * breaker.open_s or self._open_s, MAX_OPEN_FACTOR * self._open_s)
        breaker.open_until_s = self._clock() + breaker.open_s
        return True

    def _may_open_one_more(self, role: WorkerRole) -> bool:
        peers = [breaker for breaker in self._workers.values() if breaker.role is role]
        return 2 * (sum(not breaker.is_closed for breaker in peers) + 1) <= len(peers)


class Ticket:
    """One leg at one worker. `close` must follow; it says nothing about the worker."""

    def __init__(self, breakers: Breakers, breaker: _Breaker, probes: bool) -> None:
        self._breakers = breakers
        self._breaker = breaker
        self._probes = probes

    def succeeded(self) -> None:
        """The worker answered: its breaker is closed."""
        self.close()
        self._breaker.failures, self._breaker.open_until_s, self._breaker.open_s = 0, 0.0, 0.0

    def failed(self, fault: Fault) -> bool:
        """The leg failed. True where the breaker opened by it."""
        probes = self._probes
        self.close()
        return fault is not Fault.NONE and self._breakers.fail(self._breaker, fault, probes)

    def close(self) -> None:
        """Ends the probe where the leg was one. Later calls do nothing."""
        if self._probes:
            self._probes = self._breaker.probing = False
