"""A request on its way through the coordinator, and what comes out."""

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from eldr.gateway.errors import LegError
from eldr.gateway.first_token import FirstToken
from eldr.gateway.legs import ClientRequest
from eldr.gateway.transfers import Handoff

EVENT_STREAM = "text/event-stream"
LEG_ID = "X-Request-Id"


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes to the client: `body` is bytes, or the blocks of a stream that has begun."""

    status: int
    content_type: str
    headers: Mapping[str, str]
    body: bytes | AsyncIterator[bytes]


@dataclass(slots=True)
class Course:
    """How a request went so far. `failed` holds the workers that are not asked again.

    `takes_first` while the next prefill leg's token shall be the first of the answer, `first` once one is. From
    then on `request` is the rest of the request. `sampled` where its expert counts shall be recorded, `teaches`
    where the router's predictor shall learn from them.
    """

    request: ClientRequest
    held: ExitStack
    sampled: bool = False
    teaches: bool = False
    attempt: int = 1
    handoff: Handoff | None = None
    takes_first: bool = False
    first: FirstToken | None = None
    failed: set[str] = field(default_factory=set)
    failure: LegError | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def leg_headers(self, booking_id: str) -> dict[str, str]:
        """Every leg has an id of its own; the client's id never reaches an engine (case 2.15)."""
        return {**self.request.headers, LEG_ID: f"eldr-{booking_id}"}

    def left_s(self, now_s: float) -> float:
        """Seconds until the client's own deadline, infinite without one."""
        return self.request.ends_s - now_s
