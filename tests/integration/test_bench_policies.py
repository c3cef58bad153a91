"""The arithmetic of integration/bench/policies.py."""

import pytest

from eldr.simulator.clairvoyant import Clairvoyance
from eldr.simulator.measures import Figures
from eldr.simulator.runs import Run
from integration.bench.policies import bounds_of, cells_of, change


def run(
    policy: str, seed: int, p50: float, p99: float, union: float, bound: Clairvoyance | None = None
) -> Run:
    return Run(policy, seed, Figures(1, 0, 0, 0, p50, p99, p99, 1.0, union, 1.0, bound=bound))


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


def test_a_policy_reaches_the_share_of_the_possible_gain_that_its_placements_have() -> None:
    runs = [
        run("jsq", 0, 10.0, 10.0, 50.0, Clairvoyance(20.0, 20.0, 16.0)),
        run("union-cost", 0, 9.0, 9.0, 40.0, Clairvoyance(20.0, 17.0, 16.0)),
        run("union-cost", 1, 9.0, 9.0, 40.0, Clairvoyance(20.0, 18.0, 16.0)),
    ]
    jsq, union_cost = bounds_of("steady", 40.0, runs)
    assert (jsq.gained, jsq.reached) == pytest.approx((0, 0))
    assert union_cost.possible == pytest.approx(20)
    assert union_cost.gained == pytest.approx(12.5)
    assert union_cost.reached == pytest.approx(62.5)
    assert bounds_of("steady", 40.0, [run("jsq", 0, 1.0, 1.0, 1.0)]) == []
