"""Arithmetic of the drift benchmark, on a world of two domains with disjoint experts."""

import numpy as np
import pytest

from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.locality_band import LocalityBand
from integration.bench import drift as bench


def steps(requests=40):
    """Request i of domain i % 2 selects experts 4 * domain + (0, 1) in one layer at every step."""
    base = 4 * (np.arange(requests) % 2)
    return np.stack([base, base + 1], axis=1)[:, None, None, :].repeat(3, axis=1)


def test_the_union_is_what_the_mean_request_meets():
    rng = np.random.default_rng(0)
    assert bench.union_met(steps(), [[0, 2], [1, 3]], rng, 2) == 2.0
    assert bench.union_met(steps(), [[0, 1], [2, 3]], rng, 2) == 4.0
    assert bench.union_met(steps(), [[0, 1, 2], [4]], rng, 2) == pytest.approx((3 * 4 + 2) / 4)
    assert bench.union_met(steps(), [[0], []], rng, 2) == 2.0


def test_the_band_meets_fewer_experts_than_jsq():
    arrivals = np.random.default_rng(0).integers(40, size=120)
    cosines = np.eye(2, dtype=np.float32)[np.arange(40) % 2]
    band = LocalityBand(bench.TableLocality(cosines), {"tau": 0.0})
    assert bench.serve(band, arrivals, steps(), 2, 8, 0) < 3.0
    assert bench.serve(JoinShortestQueue(0), arrivals, steps(), 2, 8, 0) > 3.5


def test_every_mix_has_shares_that_sum_to_one():
    made = bench.mixes(["a", "b"], ["c"], np.random.default_rng(0))
    assert len(made) == len(bench.UNSEEN) + len(bench.SKEWS)
    assert all(sum(mix.values()) == pytest.approx(1.0) for mix in made.values())
    assert made["unseen 100%"]["c"] == 1.0


def test_draws_follow_the_mix():
    pool = {"a": np.array([1, 2]), "b": np.array([3])}
    assert set(bench.drawn({"a": 1.0, "b": 0.0}, pool, 50, np.random.default_rng(0))) == {1, 2}


def outcome(outside, tv, lost):
    return bench.Outcome(0, "x", outside, 0.0, tv, 10.0, 10.0 + lost)


def test_the_limits_part_what_pays_from_what_does_not():
    outcomes = [
        outcome(0.05, 0.1, 0.0),
        outcome(0.6, 0.1, 5.0),
        outcome(0.05, 0.7, 3.0),
        outcome(0.2, 0.2, 1.0),
    ]
    limits = bench.best_limits(outcomes)
    assert limits.right(outcomes) == 1.0
    assert 0.2 <= limits.outside < 0.6
    assert 0.2 <= limits.occupancy_tv < 0.7
    assert bench.Limits(0.0, 0.0).right(outcomes) == 0.5
