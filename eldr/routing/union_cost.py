"""Policy `union-cost`: the decoder where the request adds least step time, for itself and for those there.

With the union u and its growth du (see `survival`), and T = a + b*n + c*u (see `step_time`), the cost of
placing a request on a decoder is T + dT + n * dT with dT = b + c*du. It needs no calibration, no centroids
and any number of decoders (facts: "The marginal-union policy").
"""

from collections.abc import Mapping

import numpy as np

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView
from eldr.routing.draw import draw
from eldr.routing.eligibility import Floats, Mask, eligible_decoders, fewest, loads, within_load
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.options import Option, resolve
from eldr.routing.step_time import StepTimes
from eldr.routing.survival import SurvivalTable


class UnionCost:
    """Filters: the load bound (`within_load`), then the tail guard. Score: the marginal cost in seconds.

    Tail guard g: the step time after placement may be at most 1 + g times the mean step time of the requests
    in flight, or of the best placement where that is longer. With `power` p the score is the growth of
    n * T^p instead of n * T, in seconds at the mean step time. Without a usable signature the shortest queue
    decides, counted as a fallback; a decoder whose score is not finite is left out, counted as `non-finite`.
    """

    name = "union-cost"
    OPTIONS: Mapping[str, Option] = {
        "tail_guard": Option(
            0.05, 0.0, 100.0, "Step time after placement over the mean, as a share. 0: off."
        ),
        "power": Option(
            0.0, 0.0, 32.0, "Weight long steps more: 8 favours the tail over the median. 0: off."
        ),
        "max_load_ratio": Option(2.0, 0.0, 1e6, "Most load against the least loaded decoder. 0: unbounded."),
    }

    def __init__(
        self, step_times: StepTimes, options: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        self.options: Mapping[str, float] = resolve(self.name, self.OPTIONS, options or {})
        self._step_times = step_times
        self._seed = seed
        self._table = SurvivalTable()
        self._by_load = JoinShortestQueue(seed)

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        if request.signature is None:
            return self._load_only(request, fleet, request.signature_problem)
        ordered = sorted(fleet, key=lambda view: view.worker_id)
        names = {view.worker_id for view in eligible}
        places = [i for i, view in enumerate(ordered) if view.worker_id in names]
        union, growth = (part[places] for part in self._table.unions(ordered, request.signature))
        load = loads(eligible)
        base_s, per_request_s, per_union_s = self._coefficients(eligible)
        step_s = base_s + per_request_s * load + per_union_s * union
        added_s = per_request_s + per_union_s * growth
        cost = self._cost(load, step_s, added_s)

        finite = np.isfinite(cost)
        if not finite.any():
            return self._load_only(request, fleet, "non-finite")
        bounded = finite & within_load(np.where(finite, load, np.inf), self.options["max_load_ratio"])
        guarded = bounded & self._within_guard(load, step_s, step_s + added_s, bounded)
        best = float(cost[guarded].min())
        near = guarded & (cost <= best * (1 + 1e-9))
        picked = draw(self._seed, request.request_id, fewest(eligible, load, near))

        experts = request.signature.shape[1]
        candidates = [
            Candidate(
                view.worker_id,
                bool(guarded[i]),
                float(cost[i]),
                f"step {step_s[i] * 1e3:.2f} + {added_s[i] * 1e3:.3f} ms, union {union[i] * experts:.1f} + "
                f"{growth[i] * experts:.2f} of {experts}" + _left_out(finite[i], bounded[i], guarded[i]),
                view.in_flight,
            )
            for i, view in enumerate(eligible)
        ]
        reason = (
            f"least cost of {int(guarded.sum())}: step {step_s[picked] * 1e3:.2f} ms grows by "
            f"{added_s[picked] * 1e3:.3f} ms, union {union[picked] * experts:.1f} by "
            f"{growth[picked] * experts:.2f}, {eligible[picked].in_flight} in flight"
        )
        fallback = "" if finite.all() else "non-finite"
        return Decision(
            eligible[picked].worker_id, self.name, reason, (*candidates, *left_out), fallback=fallback
        )

    def _coefficients(self, eligible: list[DecoderView]) -> tuple[Floats, Floats, Floats]:
        fits = [self._step_times.model(view.group).coefficients for view in eligible]
        table = np.array([(fit.base_s, fit.per_request_s, fit.per_union_s) for fit in fits])
        return table[:, 0], table[:, 1], table[:, 2]

    def _cost(self, load: Floats, step_s: Floats, added_s: Floats) -> Floats:
        power = self.options["power"] or 1.0
        scale_s = float(np.nanmean(step_s)) if np.isfinite(step_s).any() else 1.0
        before, after = step_s / scale_s, (step_s + added_s) / scale_s
        cost: Floats = scale_s * ((load + 1) * after**power - load * before**power)
        return cost

    def _within_guard(self, load: Floats, step_s: Floats, after_s: Floats, among: Mask) -> Mask:
        guard = self.options["tail_guard"]
        if guard == 0:
            return among
        weight = np.where(among, load, 0.0)
        mean_s = float(weight @ np.where(among, step_s, 0.0)) / max(1.0, float(weight.sum()))
        within: Mask = after_s <= (1 + guard) * max(mean_s, float(after_s[among].min()))
        return within

    def _load_only(self, request: DecodeRequest, fleet: tuple[DecoderView, ...], fallback: str) -> Decision:
        by_load = self._by_load.select(request, fleet)
        reason = f"{fallback}: {by_load.reason}"
        return Decision(by_load.worker_id, self.name, reason, by_load.candidates, fallback=fallback)


def _left_out(finite: bool, bounded: bool, guarded: bool) -> str:
    if guarded:
        return ""
    if not finite:
        return "; not finite"
    return "; over the tail guard" if bounded else "; over the load bound"
