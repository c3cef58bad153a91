"""When a decoder gets a new plan: only where it pays, one decoder at a time, and never while it drains.

A plan pays where, over the time that it is expected to live, it saves more than its move costs:
gain * steps_per_s * horizon_s >= pays * (moved_bytes / link_bytes_per_s + stall_s), gain being the seconds that a
step becomes shorter: (largest number of activated experts on a rank before - after), mean over layers, times
`expert_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from eldr.placement.demand import Demand
from eldr.placement.geometry import Geometry, Map, PlacementError
from eldr.placement.plan import Plan, PlanSettings, plan


class Verdict(StrEnum):
    """Why a decoder gets no plan now, or that it does."""

    MOVES = "moves"
    DRAINING = "draining"
    OTHER_IN_FLIGHT = "other-in-flight"
    TOO_SOON = "too-soon"
    FEW_STEPS = "few-steps"
    SMALL_GAIN = "small-gain"
    DOES_NOT_PAY = "does-not-pay"


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """When to move. Raises PlacementError naming the field.

    link_bytes_per_s: measured between the ranks. stall_s: time in which a move serves nothing.
    horizon_s: how long a plan is expected to hold. pays: how often the gain must cover the cost.
    least_gain: relative, of the largest number of activated experts on a rank; below it nothing moves (hysteresis).
    interval_s: between two plans of one decoder; doubled with each refusal in a row, up to `longest_interval_s`.
    answer_s: a plan that is not answered by then is given up.
    """

    link_bytes_per_s: float = 25e9
    stall_s: float = 0.1
    horizon_s: float = 600.0
    pays: float = 2.0
    least_gain: float = 0.03
    interval_s: float = 60.0
    longest_interval_s: float = 3600.0
    answer_s: float = 120.0
    plan: PlanSettings = field(default_factory=lambda: PlanSettings(min_steps=256))

    def __post_init__(self) -> None:
        for name in ("link_bytes_per_s", "horizon_s", "pays", "interval_s", "longest_interval_s", "answer_s"):
            if not 0 < getattr(self, name) < np.inf:
                raise PlacementError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("stall_s", "least_gain"):
            if not 0 <= getattr(self, name) < np.inf:
                raise PlacementError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderPlacement:
    """One decoder now. `incarnation` is its process, `version` that of the map in use, int64 [layers, slots].

    steps_per_s: decode steps a second. expert_s: seconds that one more activated expert on the slowest rank, in
    every layer, adds to a step.
    """

    worker_id: str
    incarnation: str
    geometry: Geometry
    present: Map
    version: int
    demand: Demand
    steps_per_s: float
    expert_s: float
    draining: bool = False

    def __post_init__(self) -> None:
        for name in ("steps_per_s", "expert_s"):
            if not 0 <= getattr(self, name) < np.inf:
                raise PlacementError(
                    f"{self.worker_id}: {name} must be finite and at least 0, got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A plan to send: it replaces `version` of that process and becomes `version + 1`.

    saved_s is what it saves over the horizon, cost_s what it costs, both in seconds of decoding.
    """

    worker_id: str
    incarnation: str
    version: int
    plan: Plan
    saved_s: float
    cost_s: float


@dataclass(slots=True)
class _History:
    incarnation: str
    next_s: float = 0.0
    refusals: int = 0


class Controller:
    """Decides on moves; sends nothing. Every time is of the caller's one clock, in seconds."""

    def __init__(self, settings: ControlSettings | None = None) -> None:
        self._settings = ControlSettings() if settings is None else settings
        self._history: dict[str, _History] = {}
        self._in_flight: Move | None = None
        self._sent_s = 0.0

    @property
    def in_flight(self) -> Move | None:
        """The move whose answer is awaited."""
        return self._in_flight

    def consider(
        self, decoders: Sequence[DecoderPlacement], now_s: float
    ) -> tuple[Move | None, dict[str, Verdict]]:
        """The move to send now, if any, and the verdict on every decoder. The largest saving goes first.

        A move counts as in flight from here on until `answered`, `answer_s` have passed, or its process is gone.
        """
        self._drop_lost(decoders, now_s)
        verdicts, moves = dict[str, Verdict](), list[Move]()
        for decoder in decoders:
            verdict, move = self._judge(decoder, now_s)
            verdicts[decoder.worker_id] = verdict
            if move is not None:
                moves.append(move)
        if not moves:
            return None, verdicts
        best = max(moves, key=lambda move: (move.saved_s - move.cost_s, move.worker_id))
        for move in moves:
            if move is not best:
                verdicts[move.worker_id] = Verdict.OTHER_IN_FLIGHT
        self._in_flight, self._sent_s = best, now_s
        return best, verdicts

    def answered(self, worker_id: str, incarnation: str, version: int, accepted: bool, now_s: float) -> bool:
        """What became of a move. False, and without effect, for an answer to no move that is in flight.

        `version` is the one that the move made. After a refusal by any rank the decoder keeps its old map.
        """
        move = self._in_flight
        if move is None or (move.worker_id, move.incarnation, move.version + 1) != (
            worker_id,
            incarnation,
            version,
        ):
            return False
        self._in_flight = None
        self._wait(move, accepted, now_s)
        return True

    def _judge(self, decoder: DecoderPlacement, now_s: float) -> tuple[Verdict, Move | None]:
        settings, history = self._settings, self._history.get(decoder.worker_id)
        if decoder.draining:
            return Verdict.DRAINING, None
        if self._in_flight is not None:
            return Verdict.OTHER_IN_FLIGHT, None
        if history is not None and history.incarnation == decoder.incarnation and now_s < history.next_s:
            return Verdict.TOO_SOON, None
        observed = decoder.demand.observed_steps
        if observed is not None and observed < settings.plan.min_steps:
            return Verdict.FEW_STEPS, None
        made = plan(decoder.demand, decoder.geometry, settings.plan, decoder.present)
        before, after = float(made.present_max.mean()), float(made.expected_max.mean())
        if before - after < settings.least_gain * before or before == after:
            return Verdict.SMALL_GAIN, None
        saved_s = (before - after) * decoder.expert_s * decoder.steps_per_s * settings.horizon_s
        cost_s = made.moved_bytes / settings.link_bytes_per_s + settings.stall_s
        if saved_s < settings.pays * cost_s:
            return Verdict.DOES_NOT_PAY, None
        return Verdict.MOVES, Move(
            decoder.worker_id, decoder.incarnation, decoder.version, made, saved_s, cost_s
        )

    def _drop_lost(self, decoders: Sequence[DecoderPlacement], now_s: float) -> None:
        """Gives up on a move whose process is gone or silent, and forgets decoders that left."""
        here = {decoder.worker_id: decoder.incarnation for decoder in decoders}
        self._history = {
            worker_id: one
            for worker_id, one in self._history.items()
            if here.get(worker_id) == one.incarnation
        }
        move = self._in_flight
        if move is None:
            return
        if here.get(move.worker_id) != move.incarnation:
            self._in_flight = None
        elif now_s - self._sent_s >= self._settings.answer_s:
            self._in_flight = None
            self._wait(move, accepted=False, now_s=now_s)

    def _wait(self, move: Move, accepted: bool, now_s: float) -> None:
        history = self._history.setdefault(move.worker_id, _History(move.incarnation))
        history.refusals = 0 if accepted else history.refusals + 1
        pause_s = self._settings.interval_s * 2.0**history.refusals
        history.next_s = now_s + min(pause_s, self._settings.longest_interval_s)
