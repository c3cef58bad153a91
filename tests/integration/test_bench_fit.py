"""The arithmetic of integration/bench/fit.py."""

import numpy as np
import pytest
from rich.console import Console

from eldr.calibration.assignment import balanced_sizes, optimal_assignment
from integration.bench.fit import (
    EXPERTS,
    LAYERS,
    PROMPT_TOKENS,
    TOP_K,
    Recorder,
    measured_fit,
    relative_gap,
    slots_assignment,
    synthetic_counts,
    table,
)


def test_the_reference_finds_the_optimum_within_the_sizes() -> None:
    costs = np.random.default_rng(0).random((23, 5))
    sizes = balanced_sizes(23, 5)
    found = slots_assignment(costs, *sizes)
    assert set(np.bincount(found.labels).tolist()) == {4, 5}
    assert found.cost == pytest.approx(optimal_assignment(costs, *sizes).cost, rel=1e-12)


def test_a_worse_solver_shows_as_a_gap() -> None:
    costs = np.array([[1.0, 3.0], [3.0, 1.0]])

    def swapped(costs, least, most, prices):
        found = slots_assignment(costs, least, most)
        found.labels[:] = 1 - found.labels
        return type(found)(found.labels, 6.0, found.prices)

    recorder = Recorder(swapped)
    recorder(costs, 1, 1)
    assert relative_gap(recorder) == pytest.approx(2.0)
    exact = Recorder(optimal_assignment)
    exact(costs, [1, 1], [1, 1])
    assert relative_gap(exact) == 0.0


def test_counts_are_seeded_and_near_the_prompt_length_in_each_layer() -> None:
    counts = synthetic_counts(5)
    assert counts.shape == (5, LAYERS, EXPERTS)
    np.testing.assert_array_equal(counts, synthetic_counts(5))
    assert counts.sum(axis=2).mean() == pytest.approx(PROMPT_TOKENS * TOP_K, rel=0.1)


def test_a_cell_has_the_keys_of_the_report() -> None:
    patched = pytest.MonkeyPatch()
    with patched.context() as context:
        context.setattr("eldr.calibration.kmeans.optimal_assignment", optimal_assignment)
        cell = measured_fit(20, 2, by_slots=False, with_gap=True)
    assert (cell.n, cell.k) == (20, 2)
    assert cell.seconds > 0
    assert cell.peak_bytes > 10_000_000
    assert cell.objective_gap is not None
    assert cell.objective_gap <= 1e-9


def test_the_table_shows_goal_gap_and_reference_where_there_are_any() -> None:
    cell = {"n": 1_000, "k": 16, "seconds": 0.5, "peak_bytes": 2e8, "objective_gap": 0.0}
    large = {"n": 20_000, "k": 64, "seconds": 20.0, "peak_bytes": 2e9, "objective_gap": None}
    console = Console(width=120, record=True, quiet=False, file=None)
    with console.capture() as shown:
        console.print(table({"fit": [cell, large], "reference": [{**cell, "seconds": 7.25}]}))
    first, second = (line for line in shown.get().splitlines() if "GB" in line)
    assert "0.50" in first
    assert "0.0e+00" in first
    assert "7.2 s" in first
    assert "2.00 GB" in second
    assert "7.2 s" not in second
