"""The fleet as arrays, kept between decisions and brought up to date from the views that changed.

`survival[d, l, e]`, the probability that a decode step of decoder d leaves an expert untouched, is
(1 - h[d, l, e]) * product over unreported bookings r of (1 - q[r, l, e])
                 * product over fresh bookings r of (1 - missing[r] * q[r, l, e]),
h the reported hit frequency, q[r] the share of a request's tokens that select the expert (facts: "The
marginal-union policy"; `carried` for fresh ones).
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from eldr.routing.contract import Booking, DecoderView
from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]
Shares = Callable[[ExpertSignature], Floats32]


class FleetTable:
    """A cache: what it holds after `refresh` follows from the views alone.

    Rows are the decoders sorted by worker id. A decoder that runs nothing, or has not counted yet, is described
    by all its bookings and no frequencies. Frequencies of another shape make a row that is `broken`, which no
    policy picks.

    version: grows with every change. views: decoders by row. able: takes work now, broken: frequencies of
    another shape, silent: has never reported; bool [decoders].
    in_flight: int64 [decoders]. kv_tokens: reported, and prompts of unreported bookings, float64 [decoders].
    survival: float32 [decoders, layers * experts]. union: mean(1 - survival), float64 [decoders].
    groups: rows of each group, int64 [rows].
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._fleet: tuple[DecoderView, ...] = ()
        self._row_of: list[int] = []
        self._applied: list[tuple[Booking, ...] | None] = []
        self._shape = (0, 0)
        self._ones = np.ones(0, np.float32)
        self._row = np.ones(0, np.float32)
        self.version = 0
        self.views: list[DecoderView] = []
        self.able = np.zeros(0, np.bool_)
        self.broken = np.zeros(0, np.bool_)
        self.silent = np.zeros(0, np.bool_)
        self.in_flight = np.zeros(0, np.int64)
        self.kv_tokens = np.zeros(0)
        self.survival: Floats32 = np.empty((0, 0), np.float32)
        self.union: Floats64 = np.empty(0)
        self.groups: dict[str, npt.NDArray[np.int64]] = {}

    def refresh(self, fleet: tuple[DecoderView, ...], shape: tuple[int, int]) -> None:
        """Brings the rows up to date; costs a comparison by identity for a view that did not change."""
        before = self._fleet
        if len(fleet) != len(before) or shape != self._shape:
            self._rebuild(fleet, shape)
            return
        if fleet is before or fleet == before:
            return
        changed = [i for i, (new, old) in enumerate(zip(fleet, before, strict=True)) if new is not old]
        if any(
            fleet[i].worker_id != before[i].worker_id or fleet[i].group != before[i].group for i in changed
        ):
            self._rebuild(fleet, shape)
            return
        for i in changed:
            self._fill(self._row_of[i], fleet[i])
        self._fleet = fleet

    def _rebuild(self, fleet: tuple[DecoderView, ...], shape: tuple[int, int]) -> None:
        count, size = len(fleet), shape[0] * shape[1]
        order = sorted(range(count), key=lambda i: fleet[i].worker_id)
        self._row_of = [0] * count
        for row, i in enumerate(order):
            self._row_of[i] = row
        self._fleet, self._shape = fleet, shape
        self._ones, self._row = np.ones(size, np.float32), np.empty(size, np.float32)
        self._applied = [None] * count
        self.views = [fleet[i] for i in order]
        self.able, self.broken, self.silent = (np.zeros(count, np.bool_) for _ in range(3))
        self.in_flight, self.kv_tokens = np.zeros(count, np.int64), np.zeros(count)
        self.survival, self.union = np.empty((count, size), np.float32), np.empty(count)
        names = [view.group for view in self.views]
        self.groups = {
            name: np.array([row for row, of in enumerate(names) if of == name]) for name in sorted(set(names))
        }
        for row, view in enumerate(self.views):
            self._fill(row, view)

    def _fill(self, row: int, view: DecoderView) -> None:
        state, unreported = view.state, view.unreported
        counted = _has_frequencies(state)
        bookings = unreported if counted else tuple(view.bookings.values())
        survival = self.survival[row]
        applied = self._applied[row]
        if applied is None or self.views[row].state is not state or bookings[: len(applied)] != applied:
            applied = ()
            self.broken[row] = False
            if state is None or not counted:
                survival.fill(1.0)
            else:
                self.broken[row] = not self._begin(survival, state, view.fresh)
        for booking in bookings[len(applied) :]:
            self._join(survival, booking, 1.0)
        self._applied[row] = bookings
        self.views[row] = view
        self.union[row] = 1.0 - float(survival @ self._ones) / survival.size
        self.able[row] = not view.ineligible
        self.silent[row] = state is None
        self.in_flight[row] = view.in_flight
        self.version += 1
        held = 0 if state is None else state.kv_tokens
        self.kv_tokens[row] = held + sum(booking.prompt_tokens for booking in unreported)

    def _begin(self, survival: Floats32, state: DecoderState, fresh: Sequence[tuple[Booking, float]]) -> bool:
        hit = state.hit_frequency
        if hit is None or hit.shape != self._shape:
            survival.fill(1.0)
            return False
        np.subtract(np.float32(1.0), hit.reshape(-1), out=survival)
        for booking, missing in fresh:
            self._join(survival, booking, missing)
        return True

    def _join(self, survival: Floats32, booking: Booking, weight: float) -> None:
        signature = booking.signature
        if signature is None or signature.shape != self._shape:
            return
        left = np.multiply(self._shares(signature), np.float32(-weight), out=self._row)
        left += np.float32(1.0)
        survival *= left


def _has_frequencies(state: DecoderState | None) -> bool:
    # What an idle decoder still reports is of requests that are gone.
    return state is not None and state.hit_frequency is not None and state.running > 0
