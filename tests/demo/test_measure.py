"""Figures of a policy: percentiles over all its requests, ratios of totals over its rounds."""

import math

import pytest

from eldr.demo.client import Completion
from eldr.demo.measure import Meter, Round, figures_by_policy


def answer(tpot_ms, ttft_ms=100.0, tokens=5, error=""):
    first = ttft_ms / 1000
    return Completion("r", "d", (), tuple(range(tokens)), first, first + (tokens - 1) * tpot_ms / 1000, error)


def test_a_meter_grows():
    assert Meter(10, 250.0, 3.0).since(Meter(4, 100.0, 1.0)) == Meter(6, 150.0, 2.0)


def test_percentiles_are_over_all_requests_of_a_policy_in_milliseconds():
    rounds = [
        Round("a", (answer(10), answer(20)), Meter(8, 80.0, 0.1)),
        Round("b", (answer(7, 50),), Meter(4, 20.0, 0.1)),
        Round("a", (answer(30),), Meter(4, 160.0, 0.2)),
    ]
    figures = figures_by_policy(rounds)
    assert list(figures) == ["a", "b"]
    assert figures["a"].tpot_p50_ms == pytest.approx(20)
    assert figures["a"].tpot_p99_ms == pytest.approx(29.8)
    assert figures["b"].ttft_p50_ms == pytest.approx(50)
    assert figures["a"].requests == 3


def test_the_union_is_weighted_by_batch_and_cpu_time_by_tokens():
    rounds = [
        Round("a", (answer(10), answer(10)), Meter(8, 80.0, 0.1)),
        Round("a", (answer(10),), Meter(4, 160.0, 0.2)),
    ]
    figures = figures_by_policy(rounds)["a"]
    assert figures.union_mean == pytest.approx(240 / 12)
    assert figures.cpu_ms_per_token == pytest.approx(300 / 15)


def test_failed_requests_are_counted_and_measure_nothing():
    bad = Completion("r", "d", error="HTTP 503")
    figures = figures_by_policy([Round("a", (answer(10), bad), Meter(4, 40.0, 0.1))])["a"]
    assert (figures.requests, figures.errors) == (2, 1)
    assert figures.tpot_p50_ms == pytest.approx(10)


def test_nothing_measured_is_not_a_number_rather_than_zero():
    figures = figures_by_policy([Round("a", (Completion("r", "d", error="x"),), Meter(0, 0.0, 0.0))])["a"]
    assert all(
        math.isnan(value) for value in (figures.tpot_p50_ms, figures.union_mean, figures.cpu_ms_per_token)
    )
