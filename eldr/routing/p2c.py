"""Policy `p2c`: the less loaded of two decoders drawn at random (power of two choices)."""

from collections.abc import Mapping

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.draw import draw
from eldr.routing.eligibility import eligible_decoders, loads


class PowerOfTwoChoices:
    """Both are drawn by seed and request; the first drawn wins a tie."""

    name = "p2c"

    def __init__(self, seed: int = 0) -> None:
        self.options: Mapping[str, float] = {}
        self._seed = seed

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        load = loads(eligible)
        indices = list(range(len(eligible)))
        drawn = [draw(self._seed, request.request_id, indices)]
        others = [index for index in indices if index not in drawn]
        if others:
            drawn.append(draw(self._seed, f"{request.request_id}/second", others))
        picked = eligible[min(drawn, key=lambda index: float(load[index]))]
        candidates = [
            Candidate(view.worker_id, True, float(load[i]), "drawn" if i in drawn else "", view.in_flight)
            for i, view in enumerate(eligible)
        ]
        names = " and ".join(eligible[index].worker_id for index in drawn)
        reason = f"fewer in flight ({picked.in_flight}) of {names}"
        return Decision(picked.worker_id, self.name, reason, (*candidates, *left_out))
