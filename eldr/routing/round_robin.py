"""Policy `round-robin`: eligible decoders in turn, by worker id."""

from collections.abc import Mapping

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.eligibility import eligible_decoders


class RoundRobin:
    """The turn is remembered by worker id, so that decoders may come and go."""

    name = "round-robin"

    def __init__(self) -> None:
        self.options: Mapping[str, float] = {}
        self._last = ""

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        later = [view for view in eligible if view.worker_id > self._last]
        picked = later[0] if later else eligible[0]
        reason = f"next after {self._last}" if self._last else "first in turn"
        self._last = picked.worker_id
        turns = [*later, *eligible[: len(eligible) - len(later)]]
        candidates = [Candidate(v.worker_id, True, float(i), "", v.in_flight) for i, v in enumerate(turns)]
        return Decision(picked.worker_id, self.name, reason, (*candidates, *left_out))
