"""Live expert unions: for every decoder, the probability that a decode step leaves an expert untouched.

`survival[d, l, e] = (1 - h[d, l, e]) * prod over unreported bookings r of (1 - q[r, l, e])`, where h is the
reported hit frequency and q[r] the share of a request's tokens that selected the expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.routing.contract import Booking, DecoderView
from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Row:
    """What one row of the table was made from."""

    view: DecoderView
    applied: tuple[Booking, ...]


class SurvivalTable:
    """A cache: rows are brought up to date from the views, one multiplication per new booking.

    Rows are the decoders of the fleet in the order given, flattened [layers * experts]. A decoder that runs
    nothing, or has not counted yet, is described by all its bookings and no frequencies; one that has never
    reported also takes the mean of what the others reported. Frequencies of another shape make a row of NaN, which no
    policy picks.
    """

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()
        self._shape = (0, 0)
        self._rows: list[_Row | None] = []
        self._survival: Floats32 = np.empty((0, 0), np.float32)
        self._union: Floats64 = np.empty(0)
        self._last: tuple[ExpertSignature, Floats32] | None = None

    def unions(self, fleet: Sequence[DecoderView], signature: ExpertSignature) -> tuple[Floats64, Floats64]:
        """Union of every decoder and its growth by the request, float64 [decoders] each.

        Both as shares of all experts, mean over layers:
        `union = mean(1 - survival)`, `growth = mean(survival * q)`.
        """
        self._update(fleet, signature.shape)
        q = self._shares(signature)
        survival, union = self._survival, self._union
        silent = [index for index, view in enumerate(fleet) if view.state is None]
        if silent and len(silent) < len(fleet):
            reported = [self._base(view.state) for view in fleet if view.state is not None]
            survival, union = survival.copy(), union.copy()
            survival[silent] *= np.mean(reported, axis=0)
            union[silent] = 1.0 - survival[silent].mean(axis=1)
        growth = (survival @ q).astype(np.float64) / q.size
        return union, growth

    def _update(self, fleet: Sequence[DecoderView], shape: tuple[int, int]) -> None:
        ids = tuple(view.worker_id for view in fleet)
        if ids != self._ids or shape != self._shape:
            self._ids, self._shape = ids, shape
            self._rows = [None] * len(ids)
            self._survival = np.empty((len(ids), shape[0] * shape[1]), np.float32)
            self._union = np.empty(len(ids))
        for index, view in enumerate(fleet):
            row = self._rows[index]
            if row is None or row.view is not view:
                self._refresh(index, row, view)

    def _refresh(self, index: int, row: _Row | None, view: DecoderView) -> None:
        state = view.state
        bookings = view.unreported if _has_frequencies(state) else tuple(view.bookings.values())
        survival = self._survival[index]
        applied = row.applied if row is not None and row.view.state is state else None
        if applied is None or bookings[: len(applied)] != applied:
            survival[:] = self._base(state)
            applied = ()
        for booking in bookings[len(applied) :]:
            if booking.signature is not None and booking.signature.shape == self._shape:
                survival *= 1.0 - self._shares(booking.signature)
        self._union[index] = 1.0 - float(survival.mean())
        self._rows[index] = _Row(view, bookings)

    def _base(self, state: DecoderState | None) -> Floats32:
        if state is None or state.hit_frequency is None or not _has_frequencies(state):
            return np.ones(self._survival.shape[1], np.float32)
        if state.hit_frequency.shape != self._shape:
            return np.full(self._survival.shape[1], np.nan, np.float32)
        return 1.0 - state.hit_frequency.ravel()

    def _shares(self, signature: ExpertSignature) -> Floats32:
        if self._last is None or self._last[0] is not signature:
            self._last = (signature, signature.shares().ravel())
        return self._last[1]


def _has_frequencies(state: DecoderState | None) -> bool:
    # What an idle decoder still reports is of requests that are gone.
    return state is not None and state.hit_frequency is not None and state.running > 0
