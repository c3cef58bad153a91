import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.calibration.assignment import AssignmentError
from eldr.calibration.sizes import cluster_sizes


@given(
    rows=st.integers(0, 500),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=12),
)
def test_weighted_sizes_are_off_by_less_than_one_row_and_always_fit(rows, weights):
    low, high = cluster_sizes(rows, len(weights), weights)
    exact = rows * np.array(weights) / sum(weights)
    assert low.sum() <= rows <= high.sum()
    assert (np.abs(low - exact) < 1).all()
    assert (np.abs(high - exact) < 1).all()


@given(rows=st.integers(0, 500), clusters=st.integers(1, 40))
def test_equal_weights_differ_by_at_most_one(rows, clusters):
    low, high = cluster_sizes(rows, clusters)
    assert (low == rows // clusters).all()
    assert (high == -(-rows // clusters)).all()


def test_a_decoder_twice_as_fast_gets_twice_the_rows():
    low, high = cluster_sizes(40, 3, [2, 1, 1])
    assert low.tolist() == high.tolist() == [20, 10, 10]


def test_a_range_replaces_proportions():
    low, high = cluster_sizes(40, 3, least=5)
    assert (low.tolist(), high.tolist()) == ([5, 5, 5], [40, 40, 40])
    assert cluster_sizes(40, 3, most=15)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "weights must be 3 numbers"),
        ({"weights": [1, 2, 0]}, "finite and positive"),
        ({"weights": [1, 2, float("nan")]}, "finite and positive"),
        ({"weights": [1, 1, 1], "least": 1}, "not both"),
        ({"least": 4, "most": 3}, "0 <= least <= most, got 4 and 3"),
        ({"least": 4}, "3 clusters of 4 to 10 rows cannot hold 10 rows"),
        ({"most": 3}, "3 clusters of 0 to 3 rows cannot hold 10 rows"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_numbers(options, message):
    """Case 5.3."""
    with pytest.raises(AssignmentError, match=message):
        cluster_sizes(10, 3, **options)
