"""Bookings that a decoder's reports contain, but whose experts its hit frequency does not hold in full yet."""

from collections.abc import Mapping

from eldr.routing.contract import Booking
from eldr.routing.state import DecoderState

WINDOW_STEPS = 16
"""Window of the hit frequency of a decoder that does not say its own, in decode steps."""

SMALLEST_SHARE = 0.05
"""A missing share below this is none."""


class CarriedBookings:
    """Of one decoder: for how many of its decode steps each booking has been running.

    The hit frequency is an exponential mean over steps with weight 1/W (`window_steps`, the engine's
    `hit_window_steps`), so that after s steps a request's share of it still misses (1 - 1/W)^s. A booking
    counts as begun halfway between the report that contains it first and the one before. Steps are the
    decoder's own totals: no clocks are compared.
    """

    def __init__(self, window_steps: int = WINDOW_STEPS) -> None:
        if window_steps < 1:
            raise ValueError(f"window_steps must be at least 1, got {window_steps}")
        self._keep = 1.0 - 1.0 / window_steps
        self._begun: dict[str, float] = {}

    def report(
        self, previous: DecoderState | None, state: DecoderState, bookings: Mapping[str, Booking]
    ) -> tuple[tuple[Booking, float], ...]:
        """Takes a report in; `DecoderView.fresh` until the next one.

        `previous` is the report before, None for the first one. `bookings` are those of the decoder now; of
        those that ended since, nothing is missing.
        """
        same = previous is not None and previous.incarnation == state.incarnation
        if previous is None or not same:
            self._begun.clear()
        steps = state.totals.decode_steps
        middle = (steps + previous.totals.decode_steps) / 2 if previous is not None and same else steps
        self._begun = {rid: self._begun.get(rid, middle) for rid in bookings if rid in state.reservation_ids}
        missing = ((bookings[rid], self._keep ** (steps - begun)) for rid, begun in self._begun.items())
        return tuple((booking, share) for booking, share in missing if share >= SMALLEST_SHARE)
