import pytest

from eldr.plots.simulation_figures import experts_by_policy, load_skew, tpot_by_rate
from eldr.simulator.measures import Figures
from eldr.simulator.runs import Run


def run(policy: str, seed: int, p50: float, union: float) -> Run:
    series = ((1.0, 1.1), (2.0, 1.3))
    return Run(policy, seed, Figures(1, 0, 0, 0, p50, p50 + 1, p50 + 2, 1.0, union, 1.0, skew_series=series))


RUNS = [run("jsq", 0, 20.0, 80.0), run("jsq", 1, 22.0, 84.0), run("union-cost", 0, 18.0, 60.0)]


def test_lines_over_rates_are_means_over_seeds_of_each_quantile():
    slower = [run(r.policy, r.seed, r.figures.tpot_p50_ms + 5, 90.0) for r in RUNS]
    p50, p99 = tpot_by_rate({80.0: slower, 40.0: RUNS}, "steady").axes
    lines = {container.get_label(): container.lines[0] for container in p50.containers}
    assert list(lines) == ["jsq", "union-cost"]
    assert lines["jsq"].get_ydata() == pytest.approx([21.0, 26.0])
    assert lines["jsq"].get_xdata() == pytest.approx([40.0, 80.0], abs=0.5)
    assert p99.containers[0].lines[0].get_ydata() == pytest.approx([23.0, 28.0])


def test_bars_of_experts_carry_their_means():
    (axes,) = experts_by_policy(RUNS, "steady").axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([82.0, 60.0])
    assert {text.get_text() for text in axes.texts} == {"82.0", "60.0"}


def test_the_load_over_time_is_the_first_seeds():
    (axes,) = load_skew(RUNS, "steady").axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[1.0, 1.1], [2.0, 1.3]]
