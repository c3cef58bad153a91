"""Published figures of the method on 8P16D, and step-time models fitted to medians of policies other than the method.

Source: arXiv 2607.00466 and its artifact (casys-kaist/ELDR, `main_task.csv`, `main_language.csv`).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.simulator.runs import requests_of
from eldr.simulator.scenario import Scenario
from eldr.simulator.step_time import StepTime
from eldr.simulator.world import SyntheticWorld

RATES = (20.0, 40.0, 60.0, 80.0, 100.0)
DECODERS, OUTPUT_TOKENS = 16, 512
FACTORS = np.arange(0.70, 1.301, 0.01)
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_DRAWS = 30

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Published:
    """Of one workload and model, at RATES.

    `rr_p50_ms`, `domain_p50_ms`: TPOT P50 of round-robin and of pools by true domain (tasks only). `p50`, `p99`: the
    artifact's change of the static band against the best load balancer at each rate, in percent; `paper_p50`,
    `paper_p99`: the paper's mean of five rates.
    """

    rr_p50_ms: tuple[float, ...]
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    paper_p50: float
    paper_p99: float
    domain_p50_ms: tuple[float, ...] = ()


PUBLISHED: Mapping[str, Published] = {
    "task-qwen3-30b": Published(
        (15.246, 18.819, 26.815, 25.527, 25.124),
        (-11.8, -12.9, -15.2, -7.7, -13.4),
        (-4.6, -8.8, -7.1, -2.1, -5.2),
        -13.9,
        -6.0,
        (12.955, 16.839, 23.416, 23.858, 22.427),
    ),
    "task-gpt-oss-120b": Published(
        (24.104, 37.932, 45.774, 51.130, 53.880),
        (-7.9, -16.4, -17.8, -15.4, -14.9),
        (-1.3, -4.5, -3.6, -3.2, -3.3),
        -7.0,
        -3.4,
        (23.098, 33.494, 39.701, 44.714, 48.310),
    ),
    "task-gemma-4-26b": Published(
        (10.358, 16.504, 23.603, 24.673, 22.278),
        (-6.6, -9.6, -12.0, -6.0, -6.1),
        (2.8, -5.2, -8.8, -2.3, -1.7),
        -9.4,
        -5.2,
        (9.677, 15.208, 21.116, 22.695, 21.481),
    ),
    "language-qwen3-30b": Published(
        (15.601, 19.112, 26.979, 25.599, 25.758),
        (-7.7, -9.5, -11.1, -5.0, -11.1),
        (-3.8, -4.1, -5.6, 1.4, -3.4),
        -10.0,
        -6.2,
    ),
    "language-gpt-oss-120b": Published(
        (22.282, 33.833, 41.945, 48.172, 51.921),
        (-1.4, -5.1, -7.0, -6.8, -6.6),
        (0.1, 5.9, 4.8, 2.7, 1.1),
        -7.3,
        1.5,
    ),
    "language-gemma-4-26b": Published(
        (10.385, 17.089, 24.825, 25.030, 23.342),
        (-5.6, -10.9, -9.7, -4.3, -5.3),
        (1.4, -3.4, -7.3, -3.3, -1.8),
        -5.9,
        0.2,
    ),
}
"""By the name of the scenario in `integration/scenarios/published`."""

BREAKS = (33, 65)
"""Batch sizes from which another factor holds."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """A model, and the relative error at each point of the fit."""

    model: StepTime
    errors: tuple[float, ...]


def little(rates: Sequence[float], tpots_ms: Sequence[float]) -> Floats:
    """Requests in a decoder's batch, by Little's law."""
    return np.array(rates) / DECODERS * OUTPUT_TOKENS * np.array(tpots_ms) / 1e3


def step_fit(scenario: Scenario, known: Published) -> StepFit:
    """The step-time model of round-robin's medians, with mixed batches, and Domain's, with batches of one domain."""
    domains, left = _traffic(scenario)
    rng = np.random.default_rng(0)
    mixed = [_mean_union(left, size, rng) for size in _SIZES]
    alone = [_same_domain_union(domains, left, size, rng) for size in _SIZES]
    pairs = ((known.rr_p50_ms, mixed), (known.domain_p50_ms, alone))
    batches = [little(RATES, medians) for medians, _ in pairs]
    unions = [np.interp(batch, _SIZES, curve) for batch, (_, curve) in zip(batches, pairs, strict=True)]
    medians = np.concatenate([medians for medians, _ in pairs])
    return fitted(np.concatenate(batches), np.concatenate(unions), medians, BREAKS)


def same_domain_gap(scenario: Scenario, batch: int = 32) -> float:
    """How many fewer experts a batch of one domain touches than a mixed one, in percent; domains by their traffic."""
    domains, left = _traffic(scenario)
    rng = np.random.default_rng(0)
    mixed = _mean_union(left, batch, rng)
    return 100 * (1 - _same_domain_union(domains, left, batch, rng) / mixed)


def _same_domain_union(
    domains: npt.NDArray[np.str_], left: Floats, size: int, rng: np.random.Generator
) -> float:
    return sum(
        float(np.mean(domains == name)) * _mean_union(left[domains == name], size, rng)
        for name in sorted(set(domains))
    )


def _traffic(scenario: Scenario) -> tuple[npt.NDArray[np.str_], Floats]:
    """Domains and log(1 - share) [requests, layers, experts] of some 800 requests."""
    world = SyntheticWorld(scenario.world.shape, scenario.domains, scenario.world.seed)
    few = dataclasses.replace(scenario, rate=80.0, duration_s=10.0, warmup_s=0.0, calibration_requests=20)
    prompts = [arrival.prompt for arrival in requests_of(few, world, 0).arrivals]
    shares = np.stack([prompt.shares for prompt in prompts]).astype(np.float64)
    return np.array([prompt.domain for prompt in prompts]), np.log1p(-np.minimum(shares, 1 - 1e-6))


def _mean_union(left: Floats, size: int, rng: np.random.Generator) -> float:
    draws = [-np.expm1(left[rng.choice(len(left), size)].sum(axis=0)).sum() for _ in range(_DRAWS)]
    return float(np.mean(draws)) / left.shape[1]


def fitted(
    batches: Floats,
    unions: Floats,
    tpots_ms: Floats,
    breaks: Sequence[int] = (),
    weights: Floats | None = None,
) -> StepFit:
    """Least relative squares with no negative coefficient; the factors from `breaks` on are those of FACTORS.

    `weights` of the squares are equal by default.
    """
    from scipy.optimize import nnls

    root = np.ones_like(tpots_ms) if weights is None else np.sqrt(weights)
    best: tuple[float, tuple[float, ...], Floats, Floats] | None = None
    for factors in itertools.product(FACTORS, repeat=len(breaks)):
        factor = np.ones_like(batches)
        for size, value in zip(breaks, factors, strict=True):
            factor[batches >= size] = value
        terms = np.stack([np.ones_like(batches), batches, unions], axis=1) * (factor / tpots_ms)[:, None]
        found, residual = nnls(terms * root[:, None], root)
        if best is None or residual < best[0]:
            best = (float(residual), factors, found, terms @ found - 1)
    assert best is not None
    _, factors, (base, per_request, per_expert), errors = best
    pairs = tuple((size, round(float(value), 2)) for size, value in zip(breaks, factors, strict=True))
    model = StepTime(float(base), float(per_request), float(per_expert), factors=pairs)
    return StepFit(model, tuple(errors.tolist()))
