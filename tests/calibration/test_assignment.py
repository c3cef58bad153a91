import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from eldr.calibration.assignment import (
    AssignmentError,
    balanced_assignment,
    balanced_sizes,
    optimal_assignment,
)


def total(costs, labels):
    return costs[np.arange(len(costs)), labels].sum()


def slots_optimum(costs, least, most):
    """Cost of the square problem over replicated slots, solved by SciPy."""
    clusters = costs.shape[1]
    owners = np.concatenate(
        [np.repeat(np.arange(clusters), least), np.repeat(np.arange(clusters), most - least)]
    )
    square = np.zeros((len(owners), len(owners)))
    square[: len(costs)] = costs[:, owners]
    # Rows that do not exist take slots that may stay free, never those that must be filled.
    square[len(costs) :, : least.sum()] = np.abs(costs).sum() * 10 + 1
    _, slots = linear_sum_assignment(square)
    return square[np.arange(len(costs)), slots[: len(costs)]].sum()


def check(costs, least, most, prices=None):
    found = optimal_assignment(costs, least, most, prices)
    sizes = np.bincount(found.labels, minlength=costs.shape[1])
    assert (sizes >= least).all()
    assert (sizes <= most).all()
    assert found.cost == total(costs, found.labels)
    scale = np.abs(costs).max() * len(costs)
    assert abs(found.cost - slots_optimum(costs, least, most)) <= 1e-9 * scale
    return found


KINDS = {
    "continuous": lambda rng, shape: rng.random(shape),
    "ties": lambda rng, shape: rng.integers(0, 3, shape).astype(float),
    "duplicate rows": lambda rng, shape: rng.random(shape)[rng.integers(0, max(1, shape[0] // 3), shape[0])],
    "tiny and huge": lambda rng, shape: rng.random(shape) * 10.0 ** rng.choice([-12, 12]),
    "constant": lambda rng, shape: np.full(shape, 0.5),
    "negative": lambda rng, shape: -rng.random(shape),
    "crowded": lambda rng, shape: rng.random(shape) + 5 * (np.arange(shape[1]) > 0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(60))
def test_it_equals_the_replicated_slot_optimum(kind, seed):
    """Case 5.3: sizes that do not divide, ties, duplicates, huge and tiny costs; ranges open and tight."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 70))
    clusters = int(rng.integers(1, 10))
    costs = KINDS[kind](rng, (rows, clusters))
    check(costs, *balanced_sizes(rows, clusters))
    least = rng.integers(0, rows // clusters + 1, clusters)
    most = least + rng.integers(0, 1 + rows // 2, clusters)
    most[rng.integers(clusters)] += max(0, rows - most.sum())
    found = check(costs, least, most)
    moved = costs + 1e-3 * costs.std() * rng.random(costs.shape)
    check(moved, least, most, found.prices)
    check(costs, *balanced_sizes(rows, clusters), rng.normal(size=clusters) * 1e3)


@pytest.mark.parametrize(("rows", "clusters"), [(400, 16), (301, 32)])
def test_it_equals_the_optimum_on_larger_problems(rows, clusters):
    check(np.random.default_rng(1).random((rows, clusters)) ** 3, *balanced_sizes(rows, clusters))


@given(
    rows=st.integers(1, 6),
    clusters=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    exponent=st.integers(-12, 12),
)
def test_the_assignment_is_the_best_of_all_balanced_ones(rows, clusters, seed, exponent):
    """Case 5.3, and 5.1: fewer rows than clusters."""
    costs = np.random.default_rng(seed).integers(0, 5, size=(rows, clusters)) * 10.0**exponent
    best = min(
        total(costs, np.array(choice))
        for choice in itertools.product(range(clusters), repeat=rows)
        if np.ptp(np.bincount(choice, minlength=clusters)) <= 1
    )
    assert balanced_assignment(costs).cost == pytest.approx(best, rel=1e-12)


@given(rows=st.integers(1, 60), clusters=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_prices_prove_the_optimum(rows, clusters, seed):
    """No row has a better cluster at these prices; a positive price is full, a negative one at its least size."""
    rng = np.random.default_rng(seed)
    costs = rng.random((rows, clusters))
    least = rng.integers(0, rows // clusters + 1, clusters)
    most = np.maximum(least, rng.integers(0, rows + 1, clusters))
    most[0] += max(0, rows - most.sum())
    found = optimal_assignment(costs, least, most)
    priced = costs + found.prices
    assert (total(priced, found.labels) - priced.min(axis=1).sum()) == pytest.approx(0, abs=1e-9)
    sizes = np.bincount(found.labels, minlength=clusters)
    assert (sizes[found.prices > 1e-12] == most[found.prices > 1e-12]).all()
    assert (sizes[found.prices < -1e-12] == least[found.prices < -1e-12]).all()


@given(seed=st.integers(0, 1_000), shift=st.floats(-100, 100), scale=st.floats(1e-6, 1e6))
def test_shifted_and_scaled_costs_have_the_same_optimum(seed, shift, scale):
    costs = np.random.default_rng(seed).random((23, 5))
    found = balanced_assignment(costs).cost
    assert balanced_assignment(costs * scale + shift).cost == pytest.approx(
        found * scale + 23 * shift, rel=1e-9
    )


@given(seed=st.integers(0, 1_000))
def test_the_order_of_rows_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    costs = rng.random((23, 5))
    order = rng.permutation(23)
    np.testing.assert_array_equal(
        balanced_assignment(costs).labels[order], balanced_assignment(costs[order]).labels
    )


def test_the_extra_rows_go_where_they_cost_least():
    """Case 5.3: N = 7 is not divisible by K = 3."""
    costs = np.array([[0.0, 1.0, 1.0]] * 2 + [[1.0, 0.0, 1.0]] * 2 + [[1.0, 1.0, 0.0]] * 3)
    assert np.bincount(balanced_assignment(costs).labels).tolist() == [2, 2, 3]


def test_equal_calls_give_equal_labels():
    costs = np.random.default_rng(0).integers(0, 3, (200, 7)).astype(float)
    np.testing.assert_array_equal(balanced_assignment(costs).labels, balanced_assignment(costs.copy()).labels)


def test_memory_is_that_of_the_costs():
    """Case 5.6: no square matrix over the rows."""
    import tracemalloc

    costs = np.random.default_rng(0).random((20_000, 8))
    tracemalloc.start()
    balanced_assignment(costs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * costs.nbytes


def test_a_row_that_is_not_finite_is_named():
    """Case 5.5."""
    costs = np.ones((5, 2))
    costs[3, 1] = np.nan
    costs[4, 0] = np.inf
    with pytest.raises(AssignmentError, match=r"row 3: costs must be finite \(2 such rows\)"):
        balanced_assignment(costs)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (4,)])
def test_costs_without_rows_or_clusters_are_refused(shape):
    with pytest.raises(AssignmentError, match=r"costs must be \[rows, clusters\]"):
        balanced_assignment(np.zeros(shape))


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        ([2, 2], [2, 2], "5 rows do not fit clusters of 4 to 4 rows in all"),
        ([3, 3], [9, 9], "5 rows do not fit clusters of 6 to 18 rows in all"),
        ([3, 0], [2, 9], "cluster 0: sizes must be 0 <= least <= most, got 3 and 2"),
        ([0, -1], [5, 5], "cluster 1: sizes must be 0 <= least <= most, got -1 and 5"),
    ],
)
def test_sizes_that_nothing_fits_are_refused_before_solving(least, most, message):
    """Case 5.3."""
    with pytest.raises(AssignmentError, match=message):
        optimal_assignment(np.ones((5, 2)), least, most)


def test_prices_of_another_problem_are_ignored():
    costs = np.random.default_rng(0).random((9, 3))
    expected = balanced_assignment(costs).cost
    assert balanced_assignment(costs, np.array([np.nan, 0, 0])).cost == pytest.approx(expected)
    assert balanced_assignment(costs, np.zeros(7)).cost == pytest.approx(expected)
