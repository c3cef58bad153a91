"""What the router's core answers, free of the wire."""

from dataclasses import dataclass

from eldr.routing.contract import Decision
from eldr.rpc.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class Booked:
    """Answer of a booking; `decision` is None for prefill."""

    reservation_id: str
    worker: WorkerInfo
    expires_in_s: float
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a replay gets again."""

    worker: WorkerInfo
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class DecisionMade:
    """Published for every booked decode decision; `seconds` is the time that it took."""

    reservation_id: str
    worker: WorkerInfo
    decision: Decision
    seconds: float
