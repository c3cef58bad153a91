import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.calibration.assignment import MAX_ROWS, AssignmentError, balanced_assignment


def total(costs, labels):
    return costs[np.arange(len(costs)), labels].sum()


@given(
    rows=st.integers(1, 6),
    clusters=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    exponent=st.integers(-12, 12),
)
def test_the_assignment_is_the_best_of_all_balanced_ones(rows, clusters, seed, exponent):
    """Case 5.3: small integers give ties; huge and tiny costs keep the optimum."""
    costs = np.random.default_rng(seed).integers(0, 5, size=(rows, clusters)) * 10.0**exponent
    labels = balanced_assignment(costs)
    best = min(
        total(costs, np.array(choice))
        for choice in itertools.product(range(clusters), repeat=rows)
        if np.ptp(np.bincount(choice, minlength=clusters)) <= 1
    )
    assert total(costs, labels) == pytest.approx(best, rel=1e-12)


@given(rows=st.integers(1, 60), clusters=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_sizes_differ_by_at_most_one(rows, clusters, seed):
    labels = balanced_assignment(np.random.default_rng(seed).random((rows, clusters)))
    assert np.ptp(np.bincount(labels, minlength=clusters)) <= 1


def test_the_extra_rows_go_where_they_cost_least():
    """Case 5.3: N = 7 is not divisible by K = 3."""
    costs = np.ones((7, 3))
    costs[:, 2] = 0.0
    assert np.bincount(balanced_assignment(costs)).tolist() == [2, 2, 3]


def test_costs_of_very_different_size_do_not_overfill_a_cluster():
    """Case 5.3: 1e-12 and 1e12 in one matrix."""
    costs = np.full((9, 3), 1e12)
    costs[:, 0] = 1e-12
    assert np.bincount(balanced_assignment(costs)).tolist() == [3, 3, 3]


def test_many_clusters_are_feasible():
    """Case 5.3: large K."""
    labels = balanced_assignment(np.random.default_rng(0).random((150, 100)))
    assert set(np.bincount(labels, minlength=100).tolist()) == {1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_cost_that_is_not_finite_is_refused_with_its_row(bad):
    """Case 5.5."""
    costs = np.zeros((5, 2))
    costs[3, 1] = bad
    with pytest.raises(AssignmentError, match=r"row 3: costs must be finite \(1 such rows\)"):
        balanced_assignment(costs)


def test_more_rows_than_memory_allows_are_refused_before_any_work():
    """Case 5.6."""
    with pytest.raises(AssignmentError, match=f"at most {MAX_ROWS} for an exact solve, got {MAX_ROWS + 1}"):
        balanced_assignment(np.zeros((MAX_ROWS + 1, 2)))


def test_costs_without_rows_or_clusters_are_refused():
    with pytest.raises(AssignmentError, match=r"must be \[rows, clusters\]"):
        balanced_assignment(np.zeros((0, 2)))
