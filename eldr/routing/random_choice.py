"""Policy `random`: uniform over the eligible decoders."""

from collections.abc import Mapping

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.draw import draw
from eldr.routing.eligibility import eligible_decoders


class RandomChoice:
    """Every decoder is as likely as any other, whatever its load."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self.options: Mapping[str, float] = {}
        self._seed = seed

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        picked = draw(self._seed, request.request_id, eligible)
        candidates = [Candidate(v.worker_id, True, 0.0, "", v.in_flight) for v in eligible]
        reason = f"drawn from {len(eligible)} decoders"
        return Decision(picked.worker_id, self.name, reason, (*candidates, *left_out))
