"""Workers on their way out: no new work, then time to finish, then gone. Synchronous; the time is passed in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

SETTLE_S = 2.0
"""How long a worker must have nothing to do before it counts as done: another router may have booked it before
it heard of the draining, and that request is on its way."""


class DrainEnd(StrEnum):
    """How a drain ended."""

    EMPTY = "empty"
    LIMIT = "limit"


@dataclass(slots=True)
class _Drain:
    ends_at_s: float
    idle_since_s: float | None = None


class Drains:
    """Workers that leave the fleet once they are done, or at their limit."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._drains: dict[str, _Drain] = {}

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._drains

    def begin(self, worker_id: str, limit_s: float, now_s: float) -> None:
        """Starts a drain. A later call for the same worker changes its limit, counted from that call."""
        drain = self._drains.setdefault(worker_id, _Drain(0.0))
        drain.ends_at_s = now_s + limit_s

    def forget(self, worker_id: str) -> None:
        """The process is gone or replaced."""
        self._drains.pop(worker_id, None)

    def over(self, now_s: float, idle: Callable[[str], bool]) -> list[tuple[str, DrainEnd]]:
        """Workers whose drain is over now, and how; `idle` says whether a worker has nothing left to do."""
        ended = []
        for worker_id, drain in self._drains.items():
            if not idle(worker_id):
                drain.idle_since_s = None
            elif drain.idle_since_s is None:
                drain.idle_since_s = now_s
            if drain.idle_since_s is not None and now_s - drain.idle_since_s >= self._settle_s:
                ended.append((worker_id, DrainEnd.EMPTY))
            elif now_s >= drain.ends_at_s:
                ended.append((worker_id, DrainEnd.LIMIT))
        return ended
