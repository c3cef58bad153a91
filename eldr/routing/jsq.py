"""Policy `jsq`: join the shortest queue."""

from collections.abc import Mapping

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.draw import draw
from eldr.routing.eligibility import eligible_decoders, fewest, loads


class JoinShortestQueue:
    """Fewest requests in flight; ties are drawn by seed and request."""

    name = "jsq"

    def __init__(self, seed: int = 0) -> None:
        self.options: Mapping[str, float] = {}
        self._seed = seed

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        load = loads(eligible)
        tied = fewest(eligible, load)
        picked = eligible[draw(self._seed, request.request_id, tied)]
        candidates = [
            Candidate(view.worker_id, True, float(load[i]), "", view.in_flight)
            for i, view in enumerate(eligible)
        ]
        reason = f"fewest in flight ({picked.in_flight}), {len(tied)} tied"
        return Decision(picked.worker_id, self.name, reason, (*candidates, *left_out))
