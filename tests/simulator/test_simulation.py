"""The event simulation: determinism, conservation, queueing, what a router sees."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from eldr.simulator.decoder import Running, SimDecoder
from eldr.simulator.measures import interval
from eldr.simulator.runs import changes_of, requests_of, simulate, world_of
from eldr.simulator.scenario import Scenario, ScenarioError, scenario_of
from eldr.simulator.simulation import Arrival, Simulation, Topology
from eldr.simulator.step_time import StepTime
from eldr.simulator.world import Prompt, SyntheticWorld, WorldShape

SHAPE = WorldShape(layers=3, experts=16, top_k=2, subdomains=2, prompt_median=20)


def small(**more: object) -> Scenario:
    raw = {
        "name": "small",
        "mix": {"a": 1, "b": 1},
        "rate": 20,
        "duration_s": 6,
        "warmup_s": 1,
        "output": {"tokens": 40},
        "fleet": {"prefill": 2, "decode": 3},
        "world": {"shape": {"layers": 3, "experts": 16, "top_k": 2, "subdomains": 2, "prompt_median": 20}},
        "calibration_requests": 40,
    }
    return scenario_of({**raw, **more})


def prompts(count: int, seed: int = 0) -> list[Prompt]:
    world = SyntheticWorld(SHAPE, ("a",))
    return world.draw(["a"] * count, np.random.default_rng(seed))


def in_steady_time(**more: float) -> Simulation:
    topology = Topology(prefill=1, decode=2, **more)  # type: ignore[arg-type]
    return Simulation(topology, "jsq", {}, (SHAPE.layers, SHAPE.experts), SHAPE.top_k)


@pytest.mark.parametrize("policy", ["random", "jsq", "locality-band", "locality-band-online", "union-cost"])
def test_equal_seeds_give_equal_figures(policy: str) -> None:
    scenario = small()
    requests = requests_of(scenario, world_of(scenario, Path()), 3)
    assert simulate(scenario, requests, policy, 3) == simulate(scenario, requests, policy, 3)


def test_another_seed_draws_other_requests() -> None:
    scenario = small()
    world = world_of(scenario, Path())
    first, second = (requests_of(scenario, world, seed).arrivals for seed in (0, 1))
    assert [a.at_s for a in first] != [a.at_s for a in second]


def test_every_request_ends_where_decoders_join_leave_and_die() -> None:
    scenario = small(
        changes=[{"at_s": 2, "decode": 5}, {"at_s": 3, "decode": 2}, {"at_s": 4, "fail": 1}],
    )
    requests = requests_of(scenario, world_of(scenario, Path()), 0)
    simulation = Simulation(
        Topology(prefill=2, decode=3),
        "union-cost",
        {},
        requests.shape,
        requests.top_k,
        changes=changes_of(scenario),
    )
    outcomes = simulation.run(requests.arrivals)
    assert len(outcomes.finished) + outcomes.refused + outcomes.left == len(requests.arrivals)
    assert outcomes.left == 0
    assert outcomes.refused == 0
    assert outcomes.retried > 0
    assert outcomes.token_steps >= 40 * len(requests.arrivals)


def test_a_request_alone_takes_the_steps_of_the_model() -> None:
    prompt = prompts(1)[0]
    outcomes = in_steady_time(step_time=StepTime(10.0, 0.0, 0.0), transfer_s=0.5).run(
        [Arrival(1.0, "r", prompt, 11)]
    )
    ((_, request),) = outcomes.finished
    assert request.last_s - request.first_s == pytest.approx(0.1)
    prefill_s = prompt.signature.tokens / 20_000
    assert request.first_s == pytest.approx(1.0 + prefill_s + 0.5 + 0.01)


def test_prefill_waits_as_a_queue_of_fixed_service_does() -> None:
    """M/D/1: at load 0.5 the mean wait is half the service time."""
    prompt = prompts(1)[0]
    rng = np.random.default_rng(5)
    service_s = 0.1
    rate = 0.5 / service_s
    times = np.cumsum(rng.exponential(1 / rate, 4_000))
    step = StepTime(0.001, 0.0, 0.0)
    simulation = Simulation(
        Topology(
            prefill=1,
            decode=1,
            step_time=step,
            transfer_s=0.0,
            report_period_s=1000.0,
            prefill_tokens_per_s=prompt.signature.tokens / service_s,
        ),
        "round-robin",
        {},
        (SHAPE.layers, SHAPE.experts),
        SHAPE.top_k,
    )
    outcomes = simulation.run([Arrival(float(t), f"r{i}", prompt, 2) for i, t in enumerate(times)])
    waits = [request.first_s - arrival.at_s - service_s for arrival, request in outcomes.finished]
    assert np.mean(waits) == pytest.approx(service_s / 2, rel=0.12)


def test_requests_in_flight_are_rate_times_time_spent() -> None:
    """Little's law over a decoder: the time integral of the batch is the sum of the times spent in it."""
    step = StepTime(10.0, 0.0, 0.0)
    arrivals = [Arrival(0.05 * i, f"r{i}", p, 30) for i, p in enumerate(prompts(200))]
    simulation = in_steady_time(step_time=step)
    outcomes = simulation.run(arrivals)
    spent_s = sum(request.last_s - request.joined_s for _, request in outcomes.finished)
    assert outcomes.token_steps * 0.01 == pytest.approx(spent_s)


def test_expected_unions_agree_with_those_of_drawn_routes() -> None:
    rng = np.random.default_rng(1)
    layers, experts, top_k, steps = 2, 16, 3, 4_000
    expected = SimDecoder("e", StepTime(1.0, 0.0, 0.1), (layers, experts), 8)
    exact = SimDecoder("x", StepTime(1.0, 0.0, 0.1), (layers, experts), 8, exact=True)
    for i, prompt in enumerate(prompts(5)):
        routes = np.argsort(rng.random((steps, layers, experts)), axis=-1)[..., :top_k].astype(np.uint8)
        shares = np.full((layers, experts), top_k / experts, np.float32)
        made = Prompt("a", prompt.signature, shares, routes)
        for decoder in (expected, exact):
            decoder.arrive(Running(f"r{i}", made, steps), 0.0)
    for decoder in (expected, exact):
        ended = len(decoder.advance(decoder.boundary_s(0.0)))
        while decoder.running:
            ended += len(decoder.advance(decoder.next_change_s()))
        assert ended == 5
    means = [d.totals.union_tokens / d.totals.tokens for d in (expected, exact)]
    assert means[0] == pytest.approx(means[1], rel=0.02)


def test_the_router_never_gets_true_shares() -> None:
    """Requests that differ in their true shares alone are placed alike until reports tell."""
    one = prompts(20)
    other = [dataclasses.replace(p, shares=np.roll(p.shares, 5, axis=1)) for p in one]
    placed = []
    for made in (one, other):
        arrivals = [Arrival(0.001 * i, f"r{i}", p, 200) for i, p in enumerate(made)]
        simulation = Simulation(
            Topology(prefill=8, decode=3, report_period_s=1000.0),
            "union-cost",
            {},
            (SHAPE.layers, SHAPE.experts),
            SHAPE.top_k,
        )
        placed.append(simulation.run(arrivals).placements)
    assert placed[0] == placed[1]


def test_a_lost_report_does_not_reach_the_router() -> None:
    made = [Arrival(0.01 * i, f"r{i}", p, 60) for i, p in enumerate(prompts(60))]
    heard = []
    for loss in (0.0, 0.9):
        simulation = in_steady_time(report_period_s=0.05, report_loss=loss)
        count = 0
        report = simulation.core.report

        def counted(state, report=report):  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            return report(state)

        simulation.core.report = counted  # type: ignore[method-assign]
        assert len(simulation.run(made).finished) == 60
        heard.append(count)
    assert heard[1] < heard[0] / 3


def test_a_late_report_shows_an_older_state() -> None:
    made = [Arrival(0.01 * i, f"r{i}", p, 100) for i, p in enumerate(prompts(40))]
    simulation = in_steady_time(report_period_s=0.1, report_delay_s=0.3)
    ages = []
    report = simulation.core.report
    simulation.core.report = lambda state: ages.append(state.age_s) or report(state)  # type: ignore
    simulation.run(made)
    assert set(ages) == {0.0, 0.3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rat": 3}, "unknown 'rat'; did you mean 'rate'"),
        ({"rate": -1}, "rate must be"),
        ({"fleet": {"decod": 3}}, "fleet: unknown 'decod'; did you mean 'decode'"),
        ({"fleet": {"step_time": "sinthetic"}}, "did you mean 'synthetic'"),
        ({"mix": {"a": -1}}, "mix.a must be a weight"),
        ({"policies": ["union-cos"]}, "did you mean 'union-cost'"),
    ],
)
def test_a_wrong_scenario_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        small(**change)
    assert message in str(caught.value)


def test_an_interval_is_students_t() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert interval([4.0]) == (4.0, 0.0)
