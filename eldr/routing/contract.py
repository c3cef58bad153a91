"""The whole contract of a policy: `select(request, fleet) -> Decision`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, overload, runtime_checkable

from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature


class NoEligibleDecoderError(Exception):
    """Every decoder was filtered out; the message and `candidates` say why, per decoder."""

    def __init__(self, message: str, candidates: "tuple[Candidate, ...]" = ()) -> None:
        super().__init__(message)
        self.candidates = candidates


class PolicyError(ValueError):
    """Unknown policy, unknown option or an option out of range."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What a decision is about.

    `request_id` seeds the ties of this request. `signature` is None where there is no usable one, and
    `signature_problem` then names why: the fallback that a policy in need of a signature reports.
    """

    request_id: str
    signature: ExpertSignature | None = None
    signature_problem: str = "no-signature"
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
    """One decoder as a policy sees it; never changes once it is made, so policies may cache by identity.

    `bookings` are all of the router's own requests in flight there. `ineligible` is the reason why the
    decoder takes no work now ("draining", "dead", "stale 3.2 s", ...), empty when it does. Decoders of one
    `group` have the same step times. `fresh` are bookings that the last report contains but whose experts its
    hit frequency holds only in part, with the share still missing (see `carried`); fixed until the next report.

    Derived: `unreported` are the bookings that the last report does not contain. `in_flight` is what the
    decoder reported, requests of other routers included, plus the unreported ones, and never less than the
    bookings.
    """

    worker_id: str
    state: DecoderState | None
    bookings: Mapping[str, Booking] = field(default_factory=dict)
    max_num_seqs: int = 0
    ineligible: str = ""
    group: str = ""
    fresh: tuple[tuple[Booking, float], ...] = ()
    unreported: tuple[Booking, ...] = field(init=False)
    in_flight: int = field(init=False)

    def __post_init__(self) -> None:
        known = self.state.reservation_ids if self.state else frozenset()
        unreported = tuple(booking for rid, booking in self.bookings.items() if rid not in known)
        reported = self.state.running + self.state.waiting if self.state else 0
        object.__setattr__(self, "unreported", unreported)
        object.__setattr__(self, "in_flight", max(len(self.bookings), reported + len(unreported)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decoder in a decision. Lower score is better; NaN where it was not scored."""

    worker_id: str
    eligible: bool
    score: float
    reason: str
    in_flight: int


class LazyCandidates(Sequence[Candidate]):
    """Candidates that are made when somebody reads them, so that a decision does not wait for its reasons.

    `make` must depend on nothing that changes. Equal to the tuple of its candidates.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], tuple[Candidate, ...]]) -> None:
        self._make = make
        self._made: tuple[Candidate, ...] | None = None

    def _all(self) -> tuple[Candidate, ...]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


@dataclass(frozen=True, slots=True)
class Decision:
    """Which decoder, out of which candidates, and why. `fallback` names the fallback taken, empty for none.

    `candidates` is a tuple or `LazyCandidates`.
    """

    worker_id: str
    policy: str
    reason: str
    candidates: Sequence[Candidate] = ()
    fallback: str = ""


@runtime_checkable
class Prepares(Protocol):
    """A policy that can do part of its next decision before there is a request."""

    def prepare(self, fleet: tuple[DecoderView, ...], shape: tuple[int, int]) -> None:
        """Brings its caches up to date with the fleet; `shape` is that of signatures. Changes no decision."""
        ...


class Policy(Protocol):
    """Pure and synchronous; keeps no clock. Randomness comes from a seed at construction and the request id.

    What a policy keeps between calls is either a plain attribute or a cache that cannot change a decision, so
    that `copy.copy(policy).select(...)` is a dry run.
    """

    name: str
    options: Mapping[str, float]

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """Picks a decoder. Never an ineligible or excluded one; raises NoEligibleDecoderError if none is left."""
        ...
