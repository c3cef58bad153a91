"""The arithmetic behind the figures of integration/bench/capture.py."""

import numpy as np
import pytest

from integration.bench._overhead import QWEN3_30B_A3B, CacheShape, overhead, row_over_kv


def test_overhead_is_the_median_of_the_pairs_own_ratios_and_not_the_ratio_of_medians():
    found = overhead([1.0, 2.0, 4.0], [1.1, 2.0, 4.8])
    assert found.median == pytest.approx(0.1)


def test_overhead_does_not_follow_a_pair_that_was_disturbed():
    without, with_eldr = [1.0] * 21, [1.01] * 20 + [9.0]
    assert overhead(without, with_eldr).median == pytest.approx(0.01)


def test_a_gain_is_a_negative_overhead():
    assert overhead([2.0] * 5, [1.5] * 5).median == pytest.approx(-0.25)


def test_the_interval_holds_the_median_and_is_the_same_every_time():
    rng = np.random.default_rng(3)
    without = rng.normal(1.0, 0.02, 40)
    with_eldr = without * rng.normal(1.01, 0.02, 40)
    found = overhead(without, with_eldr)
    assert found.low < found.median < found.high
    assert overhead(without, with_eldr) == found


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    found = [overhead(np.ones(30), rng.normal(1.02, 0.03, 30)) for _ in range(200)]
    covered = sum(one.low <= 0.02 <= one.high for one in found)
    assert 176 <= covered <= 200


def test_the_interval_narrows_with_more_pairs():
    rng = np.random.default_rng(1)
    few, many = (overhead(np.ones(n), rng.normal(1.0, 0.05, n)) for n in (20, 500))
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_pairs_without_spread_have_an_interval_of_no_width():
    found = overhead([1.0] * 20, [1.25] * 20)
    assert (found.low, found.high) == (found.median, found.median)


@pytest.mark.parametrize(
    ("without", "with_eldr", "problem"),
    [
        ([], [], "got 0 and 0"),
        ([1.0, 1.0], [1.0], "got 2 and 1"),
        ([1.0, 0.0], [1.0, 1.0], "above 0"),
        ([1.0, 1.0], [1.0, float("nan")], "finite"),
    ],
)
def test_times_that_are_no_pairs_are_refused(without, with_eldr, problem):
    with pytest.raises(ValueError, match=problem):
        overhead(without, with_eldr)


def test_kv_bytes_of_a_block_are_keys_and_values_of_every_layer():
    assert QWEN3_30B_A3B.kv_block_bytes == 16 * 2 * 48 * 4 * 128 * 2


def test_a_byte_per_expert_and_layer_is_under_the_goal_for_qwen3_30b_a3b():
    assert row_over_kv(QWEN3_30B_A3B, 48 * 128) == pytest.approx(0.00390625)


def test_twice_the_block_size_halves_the_share_of_the_cache():
    shapes = [CacheShape(6, 6, 64, 2, 32, 2, block_size) for block_size in (16, 32)]
    small, large = (row_over_kv(shape, 6 * 64) for shape in shapes)
    assert large == pytest.approx(small / 2)
