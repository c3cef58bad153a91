"""What a run shows: time per output token, experts per step, load."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eldr.simulator.clairvoyant import Clairvoyance
from eldr.simulator.simulation import Outcomes


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that arrived after the warm-up. Times in milliseconds.

    tpot: (last token - first) / (tokens - 1) per request. ttft: arrival to first token. union: distinct experts per
    layer and decode step, weighted by batch, over the whole run. skew: largest load over mean load, mean over time.
    """

    requests: int
    refused: int
    unfinished: int
    retried: int
    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float
    union: float
    skew: float
    tpot_quantiles_ms: tuple[float, ...] = ()
    """Of TPOT, in steps of 1 %, 0 to 100."""
    skew_series: tuple[tuple[float, float], ...] = ()
    """(time in seconds, largest load over mean load), from the warm-up until the last arrival."""
    step_time_error: float | None = None
    """Mean of |predicted / true - 1| of step times, as the router's model had them before each report."""
    share_error: float | None = None
    """Share of a request's picks that the router's predictor put on other experts; 0 is exact, 1 all wrong."""
    bound: Clairvoyance | None = None
    """Against the best placement of the requests in flight at some moments, where that was asked for."""


class EmptyRunError(ValueError):
    """No request ended after the warm-up."""


def tpots_ms(outcomes: Outcomes, warmup_s: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Time per output token of each finished request that arrived after the warm-up and has two tokens or more."""
    return np.array(
        [
            1e3 * (request.last_s - request.first_s) / (request.output_tokens - 1)
            for arrival, request in outcomes.finished
            if arrival.at_s >= warmup_s and request.output_tokens > 1
        ]
    )


def figures_of(outcomes: Outcomes, warmup_s: float, duration_s: float) -> Figures:
    """Raises EmptyRunError where nothing was measured."""
    tpot = tpots_ms(outcomes, warmup_s)
    if not tpot.size:
        raise EmptyRunError(f"no request that arrived after {warmup_s:g} s ended")
    ttft = [
        1e3 * (request.first_s - arrival.at_s)
        for arrival, request in outcomes.finished
        if arrival.at_s >= warmup_s
    ]
    p50, p95, p99 = np.percentile(tpot, [50, 95, 99])
    skews = [(at_s, skew) for at_s, skew in outcomes.skew if warmup_s <= at_s <= duration_s]
    return Figures(
        requests=len(tpot),
        refused=outcomes.refused,
        unfinished=outcomes.left,
        retried=outcomes.retried,
        tpot_p50_ms=float(p50),
        tpot_p95_ms=float(p95),
        tpot_p99_ms=float(p99),
        ttft_p50_ms=float(np.median(ttft)),
        union=outcomes.union_tokens / outcomes.token_steps,
        skew=float(np.mean([skew for _, skew in skews])) if skews else 1.0,
        tpot_quantiles_ms=tuple(np.percentile(tpot, np.arange(101)).round(4).tolist()),
        skew_series=tuple(skews),
        step_time_error=_mean_after(outcomes.step_errors, warmup_s),
        share_error=_mean_after(outcomes.share_errors, warmup_s),
    )


def _mean_after(timed: Sequence[tuple[float, float]], from_s: float) -> float | None:
    values = [value for at_s, value in timed if at_s >= from_s]
    return float(np.mean(values)) if values else None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval over seeds (Student's t); 0 for one value."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, 0.0
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return mean, float(t.ppf(0.975, len(values) - 1)) * error
