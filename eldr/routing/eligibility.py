"""The filter that every policy begins with, and the candidates that every decision ends with."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eldr.routing.contract import Candidate, DecodeRequest, DecoderView, NoEligibleDecoderError

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def eligible_decoders(
    request: DecodeRequest, fleet: Sequence[DecoderView]
) -> tuple[list[DecoderView], list[Candidate]]:
    """Decoders that may take the request, sorted by worker id, and the others with the reason.

    Raises NoEligibleDecoderError where none may.
    """
    eligible: list[DecoderView] = []
    left_out: list[Candidate] = []
    for view in sorted(fleet, key=lambda view: view.worker_id):
        reason = view.ineligible or ("excluded by the caller" if view.worker_id in request.exclude else "")
        if reason:
            left_out.append(Candidate(view.worker_id, False, math.nan, reason, view.in_flight))
        else:
            eligible.append(view)
    if not eligible:
        reasons = "; ".join(f"{candidate.worker_id}: {candidate.reason}" for candidate in left_out)
        raise NoEligibleDecoderError(
            f"no decoder is eligible: {reasons}" if reasons else "no decoder is registered", tuple(left_out)
        )
    return eligible, left_out


def loads(views: Sequence[DecoderView]) -> Floats:
    """Requests in flight, float64 [decoders].

    A decoder that has never reported counts as the mean of what the others reported, plus the router's own
    bookings there: neither shunned nor flooded (case 3.7).
    """
    in_flight = np.array([view.in_flight for view in views], dtype=np.float64)
    silent = np.array([view.state is None for view in views])
    if silent.any() and not silent.all():
        reported = [view.in_flight - len(view.unreported) for view in views if view.state is not None]
        in_flight[silent] += sum(reported) / len(reported)
    return in_flight


def within_load(load: Floats, max_load_ratio: float) -> Mask:
    """Decoders that may take one more request without a load gap, bool [decoders], never all False.

    After placement a decoder may have at most `max_load_ratio` times as many requests as the least loaded one
    has, or two more than it. So no similarity term outweighs a large gap (cases 3.5, 3.6). 0 is no bound.
    """
    if max_load_ratio == 0:
        return np.ones(load.shape, dtype=np.bool_)
    least = float(load.min())
    out: Mask = load + 1 <= max(max_load_ratio * least, least + 2)
    return out


def fewest(views: Sequence[DecoderView], load: Floats, among: Mask | None = None) -> list[int]:
    """Indices of the least loaded decoders among those marked (default: all), ascending, never empty."""
    bounded = load if among is None else np.where(among, load, np.inf)
    return [int(index) for index in np.flatnonzero(bounded == bounded.min())]
