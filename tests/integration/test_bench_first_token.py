"""The arithmetic of integration/bench/first_token.py."""

import pytest

from eldr.demo.client import Completion
from integration.bench.first_token import figures, ratio_interval


def answers(firsts: list[float]) -> list[Completion]:
    return [Completion("r", "", first_s=first, last_s=first + 1.0) for first in firsts]


def test_the_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    ordinary = [0.2 + 0.001 * i for i in range(31)]
    option = [0.1 + 0.001 * i for i in range(31)]
    row = figures({"ordinary": answers(ordinary), "first-token": answers(option)})
    assert row["requests"] == 31
    assert row["ttft_s"] == {"ordinary": 0.215, "first-token": 0.115}
    assert row["ttft_ratio"] == pytest.approx(0.115 / 0.215, abs=1e-4)
    assert row["ttft_ratio_low"] < row["ttft_ratio"] < row["ttft_ratio_ci"] < 1.0
    assert row["last_token_s"]["ordinary"] == pytest.approx(1.215)


def test_equal_samples_have_an_interval_around_one_and_equal_seeds_the_same() -> None:
    sample = [0.1, 0.2, 0.3, 0.4, 0.5]
    low, high = ratio_interval(sample, sample)
    assert low < 1.0 < high
    assert (low, high) == ratio_interval(sample, sample)
