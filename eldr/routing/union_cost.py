"""Policy `union-cost`: the decoder where the request adds least step time, for itself and for those there.

With the union u and its growth du (see `fleet_table`), and the step time T(n, u, k) of `step_time`, the cost of
placing a request on a decoder is T + dT + n * dT, dT the growth of T by the request. It needs no calibration, no
centroids and any number of decoders (facts: "The marginal-union policy").
"""

from collections.abc import Mapping

import numpy as np

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView, LazyCandidates
from eldr.routing.draw import draw
from eldr.routing.eligibility import Floats, Mask, eligible_decoders
from eldr.routing.fleet_table import FleetTable
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.options import Option, resolve
from eldr.routing.predictor import Predictor
from eldr.routing.prices import Prices
from eldr.routing.step_time import StepTimes


class UnionCost:
    """Filters: the load bound, then the tail guard where it is on. Score: the marginal cost in seconds.

    With `power` p the score is the growth of n * T^p instead of n * T, in seconds at the mean step time. Where
    decoders hold few requests, one more changes T by a larger share, so p falls in proportion to the mean in
    flight below `power_load`, to 1: one more request then weighs about the same at any load. Tail
    guard g: the step time after placement may be at most 1 + g times the mean step time of the requests in
    flight, or of the best placement where that is longer. Load bound r: after placement at most r times the
    mean of the eligible decoders' requests in flight, or two more. Without a usable signature the shortest
    queue decides, counted as a fallback; a decoder whose score is not finite is left out, counted as
    `non-finite`.
    """

    name = "union-cost"
    OPTIONS: Mapping[str, Option] = {
        "power": Option(6.0, 0.0, 32.0, "Weight of long steps: 1 favours the median, 8 the tail. 0: as 1."),
        "power_load": Option(48.0, 0.0, 1e6, "Mean in flight for all of `power`, less for less. 0: always."),
        "tail_guard": Option(0.0, 0.0, 100.0, "Step time after placement over the mean, as a share. 0: off."),
        "max_load_ratio": Option(1.5, 0.0, 1e6, "Most load against the mean. 0: unbounded."),
        "predictor": Option(1.0, 0.0, 1.0, "1: learned decode shares, where they are better. 0: plain."),
    }

    def __init__(
        self,
        step_times: StepTimes,
        options: Mapping[str, float] | None = None,
        seed: int = 0,
        predictor: Predictor | None = None,
    ) -> None:
        self.options: Mapping[str, float] = resolve(self.name, self.OPTIONS, options or {})
        self._step_times = step_times
        self._seed = seed
        self._predictor = (predictor or Predictor()) if self.options["predictor"] else Predictor()
        self._table = FleetTable(self._predictor.shares)
        self._prices = Prices(
            self._table,
            step_times,
            self.options["max_load_ratio"],
            self.options["power"],
            self.options["power_load"],
        )
        self._by_load = JoinShortestQueue(seed)

    def prepare(self, fleet: tuple[DecoderView, ...], shape: tuple[int, int]) -> None:
        """Does the part of the next decision that does not depend on the request. Changes no decision."""
        self._table.refresh(fleet, shape)
        if fleet:
            self._prices.refresh()

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        signature = request.signature
        if signature is None:
            return self._load_only(request, fleet, request.signature_problem)
        if not fleet:
            eligible_decoders(request, fleet)
        shape = signature.shape
        self.prepare(fleet, shape)
        prices, views = self._prices, self._table.views
        growth, after_s = prices.after(self._predictor.shares(signature), request.prompt_tokens)
        cost = prices.cost(after_s)
        if request.exclude or self.options["tail_guard"]:
            self._close(cost, after_s, request.exclude)
        picked = int(cost.argmin())
        best = cost[picked]
        if not best < np.inf:
            eligible_decoders(request, fleet)
            return self._load_only(request, fleet, "non-finite")
        near = cost <= best * (1 + 1e-9)
        if np.count_nonzero(near) > 1:
            picked = self._of_equals(request, near)
        view = views[picked]
        reason = (
            f"least cost, {float(best) * prices.scale_s * 1e3:.2f} ms: step {prices.step_s[picked] * 1e3:.2f} ms "
            f"becomes {after_s[picked] * 1e3:.2f} ms, {view.in_flight} in flight"
        )
        seen = (request.exclude, shape[1], prices.union, growth, prices.step_s, after_s)
        cost_s, broken, now = cost * prices.scale_s, prices.broken, tuple(views)
        candidates = LazyCandidates(lambda: _candidates(now, cost_s, broken, *seen))
        fallback = "non-finite" if prices.any_broken else ""
        return Decision(view.worker_id, self.name, reason, candidates, fallback)

    def _close(self, cost: Floats, after_s: Floats, exclude: frozenset[str]) -> None:
        """Raises the cost of the excluded and of those over the tail guard to infinity."""
        prices, table = self._prices, self._table
        among = prices.open
        if exclude:
            kept = np.array([view.worker_id not in exclude for view in table.views], np.bool_)
            among = prices.within_load(table.able & ~prices.broken & kept)
            lifted = among & ~prices.open
            cost[lifted] = after_s[lifted] * prices.more[lifted] / prices.scale_s
            cost[~among] = np.inf
        guard = self.options["tail_guard"]
        if guard and among.any():
            weight = np.where(among, prices.load, 0.0)
            mean_s = float(weight @ prices.step_s) / max(1.0, float(weight.sum()))
            limit_s = (1 + guard) * max(mean_s, float(after_s[among].min()))
            cost[after_s > limit_s] = np.inf

    def _of_equals(self, request: DecodeRequest, near: Mask) -> int:
        rows = np.flatnonzero(near)
        load = self._prices.load[rows]
        return int(draw(self._seed, request.request_id, rows[load == load.min()].tolist()))

    def _load_only(self, request: DecodeRequest, fleet: tuple[DecoderView, ...], fallback: str) -> Decision:
        by_load = self._by_load.select(request, fleet)
        reason = f"{fallback}: {by_load.reason}"
        return Decision(by_load.worker_id, self.name, reason, by_load.candidates, fallback=fallback)


def _candidates(
    views: tuple[DecoderView, ...],
    cost_s: Floats,
    broken: Mask,
    exclude: frozenset[str],
    experts: int,
    union: Floats,
    growth: Floats,
    step_s: Floats,
    after_s: Floats,
) -> tuple[Candidate, ...]:
    """Those that may take work first; arrays are [decoders], unions as shares of the experts."""
    scored, others = [], []
    for i, view in enumerate(views):
        out = view.ineligible or ("excluded by the caller" if view.worker_id in exclude else "")
        if out:
            others.append(Candidate(view.worker_id, False, float("nan"), out, view.in_flight))
            continue
        allowed = bool(cost_s[i] < np.inf)
        reason = (
            f"step {step_s[i] * 1e3:.2f} + {(after_s[i] - step_s[i]) * 1e3:.3f} ms, union "
            f"{union[i] * experts:.1f} + {growth[i] * experts:.2f} of {experts}"
        )
        if broken[i]:
            reason = "not finite: hit frequencies of another shape"
        elif not allowed:
            reason += "; over the load bound or the tail guard"
        cost = float("nan") if broken[i] else float(cost_s[i])
        scored.append(Candidate(view.worker_id, allowed, cost, reason, view.in_flight))
    return (*scored, *others)
