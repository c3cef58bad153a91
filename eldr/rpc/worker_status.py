"""A worker as the router sees it; field meanings as in `protos/eldr/v1/fleet.proto`."""

from dataclasses import dataclass
from enum import StrEnum

from eldr.routing.state import DecoderState
from eldr.rpc.worker_info import WorkerInfo


class WorkerHealth(StrEnum):
    """Derived from the age of the last report, by the router's own clock."""

    STARTING = "starting"
    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A picked worker: where to send the leg, and which process is meant."""

    worker_id: str
    incarnation: str
    http_url: str
    grpc_address: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """`bookings` are the router's own; `state_age_s` is negative before the first report.

    `state` is the last report without its hit frequencies, None for prefill workers and before the first.
    `reason` says why the worker gets no new work, empty when it does.
    """

    info: WorkerInfo
    health: WorkerHealth
    bookings: int
    state_age_s: float
    state: DecoderState | None
    reason: str
