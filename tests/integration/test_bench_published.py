"""The fit to published medians, and the arithmetic of integration/bench/published.py."""

import numpy as np
import pytest

from eldr.simulator.measures import Figures
from eldr.simulator.runs import Run
from eldr.simulator.scenario import load_scenario
from eldr.simulator.step_time import MODELS, StepTime
from integration.bench._published import PUBLISHED, fitted, little, same_domain_gap
from integration.bench.published import SCENARIOS, rate_row, refit, setup_row


def test_littles_law_gives_the_batches_that_the_medians_mean():
    assert little([20.0, 100.0], [15.2, 25.1]).round().tolist() == [10, 80]


def test_a_fit_finds_the_model_that_made_the_medians():
    model = StepTime(9.0, 0.02, 0.12, factors=((33, 1.2),))
    batches, unions = np.array([10.0, 24, 51, 65, 80]), np.array([47.0, 76, 97, 103, 107])
    times = np.array([1e3 * model.seconds(int(n), u) for n, u in zip(batches, unions, strict=True)])
    found = fitted(batches, unions, times, (33,))
    assert found.model.factors == ((33, 1.2),)
    assert (found.model.base_ms, found.model.per_expert_ms) == (pytest.approx(9.0), pytest.approx(0.12))
    assert max(map(abs, found.errors)) < 1e-6


@pytest.mark.parametrize("setup", ["task-qwen3-30b", "task-gpt-oss-120b", "task-gemma-4-26b"])
def test_the_named_models_are_those_of_the_fit(setup):
    fit = refit(setup)
    named = MODELS[setup.removeprefix("task-")]
    for name in ("base_ms", "per_request_ms", "per_expert_ms"):
        assert getattr(named, name) == pytest.approx(getattr(fit.model, name), abs=6e-4)
    assert named.factors[: len(fit.model.factors)] == fit.model.factors
    assert np.mean(np.abs(fit.errors)) < 0.035


def test_every_published_setup_has_its_scenario_and_step_time():
    for setup in PUBLISHED:
        scenario = load_scenario(SCENARIOS / f"{setup}.yaml")
        assert scenario.name == setup
        assert scenario.fleet.step_time == MODELS[setup.partition("-")[2]]


@pytest.mark.parametrize(
    ("path", "least", "most"),
    [
        (SCENARIOS / "task-qwen3-30b.yaml", 17, 21),
        (SCENARIOS / "task-gpt-oss-120b.yaml", 17, 21),
        (SCENARIOS / "language-qwen3-30b.yaml", 3, 10),
        (SCENARIOS / "language-gpt-oss-120b.yaml", 3, 10),
        (SCENARIOS.parent / "weak-locality.yaml", 3, 8),
    ],
    ids=lambda value: value.stem if hasattr(value, "stem") else None,
)
def test_domains_are_as_local_as_the_scenario_says(path, least, most):
    assert least <= same_domain_gap(load_scenario(path)) <= most


def run(policy: str, p50: float, p99: float) -> Run:
    return Run(policy, 0, Figures(1, 0, 0, 0, p50, p99, p99, 1.0, 50.0, 1.0))


def test_differences_are_points_between_means_over_the_rates():
    runs = [run("round-robin", 10.0, 20.0), run("jsq", 11.0, 19.0), run("locality-band", 9.0, 18.05)]
    rows = [rate_row("task-qwen3-30b", rate, runs) for rate in (20.0, 40.0)]
    assert rows[0].p50 == pytest.approx(-10)
    assert rows[0].p99 == pytest.approx(-5)
    mean = setup_row(rows)
    assert mean.p50_artifact == pytest.approx((-11.8 - 12.9) / 2)
    assert mean.p50_off == (pytest.approx(2.35), pytest.approx(3.9))
    assert mean.within == (True, True)
