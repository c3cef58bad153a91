"""The arithmetic of integration/bench/policies.py."""

import pytest

from eldr.simulator.measures import Figures
from eldr.simulator.runs import Run
from integration.bench.policies import cells_of, change


def run(policy: str, seed: int, p50: float, p99: float, union: float) -> Run:
    return Run(policy, seed, Figures(1, 0, 0, 0, p50, p99, p99, 1.0, union, 1.0))


def test_each_quantile_has_its_own_best_load_balancer() -> None:
    runs = [
        run("round-robin", 0, 10.0, 30.0, 50.0),
        run("jsq", 0, 12.0, 20.0, 50.0),
        run("union-cost", 0, 9.0, 19.0, 40.0),
    ]
    cell = cells_of("steady", 40.0, runs)[-1]
    assert cell.policy == "union-cost"
    assert cell.tpot_p50_vs_lb == pytest.approx(-10)
    assert cell.tpot_p99_vs_lb == pytest.approx(-5)
    assert cell.union_vs_rr == pytest.approx(-20)


def test_the_interval_is_of_paired_changes() -> None:
    mean, (low, high) = change([9.0, 18.0, 27.0], [10.0, 20.0, 30.0])
    assert mean == pytest.approx(-10)
    assert (low, high) == pytest.approx((-10, -10))
