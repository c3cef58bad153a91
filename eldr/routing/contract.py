"""The whole contract of a policy: `select(request, fleet) -> Decision`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature


class NoEligibleDecoderError(Exception):
    """Every decoder was filtered out; the message says why, per decoder."""


class PolicyError(ValueError):
    """Unknown policy, unknown option or an option out of range."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What a decision is about. `signature` is None where prefill could not give a usable one."""

    request_id: str
    signature: ExpertSignature | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    domain: str = ""
    exclude: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Booking:
    """One request that the router placed and has not released."""

    reservation_id: str
    signature: ExpertSignature | None
    prompt_tokens: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DecoderView:
    """One decoder as a policy sees it.

    `bookings` are all of the router's own requests in flight there; those whose reservation id is not in
    `state.reservation_ids` are news that the last report does not contain. `ineligible` is the reason why the
    decoder takes no work now ("draining", "dead", "stale 3.2 s", ...), empty when it does.
    """

    worker_id: str
    state: DecoderState | None
    bookings: Mapping[str, Booking] = field(default_factory=dict)
    max_num_seqs: int = 0
    ineligible: str = ""

    @property
    def unreported(self) -> list[Booking]:
        """Bookings that the last report does not contain."""
        known = self.state.reservation_ids if self.state else frozenset()
        return [booking for rid, booking in self.bookings.items() if rid not in known]

    @property
    def in_flight(self) -> int:
        """Requests there: what the decoder reported plus what the router placed since, at least its bookings.

        Requests of other routers are in the report, so both sources count (ask 1 and 8 of the field).
        """
        reported = self.state.running + self.state.waiting if self.state else 0
        return max(len(self.bookings), reported + len(self.unreported))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decoder in a decision. Lower score is better; NaN where it was not scored."""

    worker_id: str
    eligible: bool
    score: float
    reason: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Which decoder, out of which candidates, and why. `fallback` names the fallback taken, empty for none."""

    worker_id: str
    policy: str
    reason: str
    candidates: tuple[Candidate, ...] = ()
    fallback: str = ""


class Policy(Protocol):
    """Pure and synchronous; keeps no clock. Randomness comes in by seed at construction."""

    name: str
    options: Mapping[str, float]

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """Picks a decoder. Never an ineligible or excluded one; raises NoEligibleDecoderError if none is left."""
        ...
