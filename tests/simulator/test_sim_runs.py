from pathlib import Path

import numpy as np
import pytest
from small_worlds import SHAPE, TOP_K, prompt, tiny

from eldr.router.core import RouterCore
from eldr.simulator.runs import changes_of, moments_s, requests_of, simulate, world_of
from eldr.simulator.scenario import ScenarioError
from eldr.simulator.simulation import Arrival, Change, Simulation, Topology
from eldr.simulator.step_time import StepTime

POLICIES = ("random", "round-robin", "jsq", "p2c", "locality-band", "locality-band-online", "union-cost")


def drawn(scenario, seed=0):
    return requests_of(scenario, world_of(scenario, Path(".")), seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_give_equal_figures(policy):
    scenario = tiny()
    figures = [simulate(scenario, drawn(scenario), policy, 0) for _ in range(2)]
    assert figures[0] == figures[1]
    assert figures[0].requests > 50
    assert figures[0].unfinished == figures[0].refused == 0


def test_other_seeds_give_other_requests():
    scenario = tiny()
    assert [a.at_s for a in drawn(scenario, 0).arrivals] != [a.at_s for a in drawn(scenario, 1).arrivals]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [{"at_s": 2, "decode": 6}, {"at_s": 4, "decode": 2}],
        [{"at_s": 2, "fail": 2}, {"at_s": 3, "fail": 1}],
        [{"at_s": 2, "fail": 1}, {"at_s": 3, "decode": 5}],
    ],
)
@pytest.mark.parametrize("policy", ["jsq", "locality-band-online", "union-cost"])
def test_every_arrival_ends_in_exactly_one_way(changes, policy):
    scenario = tiny(changes=changes, output={"tokens": 120})
    requests = drawn(scenario)
    simulation = run_with(scenario, requests, policy, changes_of(scenario))
    outcomes = simulation.outcomes
    assert len(outcomes.finished) + outcomes.refused + outcomes.left == len(requests.arrivals)
    assert outcomes.left == 0
    names = sorted(arrival.request_id.rstrip("+") for arrival, _ in outcomes.finished)
    assert names == sorted(arrival.request_id for arrival in requests.arrivals)
    assert bool(outcomes.retried) == any("fail" in change for change in changes)


def run_with(scenario, requests, policy, changes=(), **topology):
    simulation = Simulation(
        Topology(prefill=2, decode=scenario.fleet.decode, **topology),
        policy,
        {},
        requests.shape,
        requests.top_k,
        changes=changes,
    )
    simulation.run(requests.arrivals)
    return simulation


def test_requests_left_at_the_end_of_time_are_counted():
    requests = drawn(tiny())
    simulation = Simulation(Topology(decode=2), "jsq", {}, requests.shape, requests.top_k, until_s=2.0)
    outcomes = simulation.run(requests.arrivals)
    assert outcomes.left > 0
    assert len(outcomes.finished) + outcomes.left == len(requests.arrivals)


def test_a_joined_decoder_gets_work_and_drained_and_dead_ones_get_none():
    scenario = tiny()
    requests = drawn(scenario)
    changes = [
        Change(2.0, "join", ("decode-009",)),
        Change(3.0, "drain", ("decode-000",)),
        Change(3.0, "fail", ("decode-001",)),
    ]
    simulation = run_with(scenario, requests, "jsq", changes)
    placed = simulation.outcomes.placements
    assert any(name == "decode-009" for _, name in placed)
    routed_late = {a.request_id for a in requests.arrivals if a.at_s > 3.0}
    late = {name for request_id, name in placed if request_id in routed_late}
    assert late == {"decode-002", "decode-003", "decode-009"}


def test_one_request_alone_has_the_closed_forms_times():
    step = StepTime(8.0, 1.0, 0.5)
    simulation = Simulation(
        Topology(prefill=1, decode=1, step_time=step, prefill_tokens_per_s=1000.0, transfer_s=0.005),
        *("round-robin", {}, SHAPE, TOP_K),
    )
    outcomes = simulation.run([Arrival(1.0, "r", prompt(), 30)])
    ((_, request),) = outcomes.finished
    assert request.first_s == pytest.approx(1.0 + 0.010 + 0.005 + step.seconds(1, 2.0), rel=1e-6)
    assert (request.last_s - request.first_s) / 29 == pytest.approx(step.seconds(1, 2.0), rel=1e-4)


def test_a_retry_counts_from_its_first_arrival():
    simulation = Simulation(
        Topology(prefill=1, decode=2),
        *("round-robin", {}, SHAPE, TOP_K),
        changes=[Change(1.5, "fail", ("decode-000",)), Change(1.5, "fail", ("decode-001",))][:1],
    )
    outcomes = simulation.run([Arrival(1.0, "r0", prompt(), 200), Arrival(1.0, "r1", prompt(), 200)])
    assert outcomes.retried == 1
    assert {arrival.at_s for arrival, _ in outcomes.finished} == {1.0}


def test_lost_and_late_reports_reach_the_router_as_such(monkeypatch):
    scenario = tiny()
    requests = drawn(scenario)
    seen = []
    report = RouterCore.report

    def spy(self, state, *rest):
        seen.append(state)
        return report(self, state, *rest)

    monkeypatch.setattr(RouterCore, "report", spy)
    run_with(scenario, requests, "jsq", report_period_s=0.1)
    all_of_them = len(seen)
    seen.clear()
    run_with(scenario, requests, "jsq", report_period_s=0.1, report_loss=0.5, report_delay_s=0.7)
    assert 0.35 * all_of_them < len(seen) < 0.65 * all_of_them
    assert {state.age_s for state in seen if state.sequence > 1} == {0.7}


def test_the_router_sees_signatures_and_never_true_shares(monkeypatch):
    scenario = tiny()
    requests = drawn(scenario)
    seen = []
    reserve = RouterCore.reserve_decode

    def spy(self, request):
        seen.append(request)
        return reserve(self, request)

    monkeypatch.setattr(RouterCore, "reserve_decode", spy)
    run_with(scenario, requests, "union-cost")
    by_id = {arrival.request_id: arrival for arrival in requests.arrivals}
    assert len(seen) == len(by_id)
    for request in seen:
        arrival = by_id[request.request_id]
        assert request.signature is arrival.prompt.signature
        fields = [getattr(request, name, None) for name in request.__slots__]
        assert not any(value is arrival.prompt.shares for value in fields)
        assert np.issubdtype(np.asarray(request.signature.counts).dtype, np.integer)


def test_union_cost_meets_fewer_experts_than_round_robin():
    scenario = tiny(duration_s=12, rate=60, output={"tokens": 100}, mix={"a": 1, "b": 1, "c": 1, "d": 1})
    requests = drawn(scenario)
    unions = {
        policy: simulate(scenario, requests, policy, 0).union for policy in ("round-robin", "union-cost")
    }
    assert unions["union-cost"] < unions["round-robin"]


def test_changes_drain_the_youngest_and_fail_the_oldest():
    scenario = tiny(changes=[{"at_s": 1, "decode": 6}, {"at_s": 2, "fail": 1}, {"at_s": 3, "decode": 3}])
    assert [(c.kind, c.names) for c in changes_of(scenario)] == [
        ("join", ("decode-004", "decode-005")),
        ("fail", ("decode-000",)),
        ("drain", ("decode-004", "decode-005")),
    ]
    with pytest.raises(ScenarioError, match="no decoder is left at 1 s"):
        changes_of(tiny(changes=[{"at_s": 1, "fail": 4}]))


def test_bursts_keep_the_mean_rate():
    scenario = tiny(rate=50, duration_s=200, bursts={"on_s": 2, "off_s": 3, "factor": 4})
    times = np.array([a.at_s for a in drawn(scenario).arrivals])
    assert len(times) / 200 == pytest.approx(50, rel=0.05)
    on = (times % 5) < 2
    assert (on.sum() / 2) / ((~on).sum() / 3) == pytest.approx(4, rel=0.1)


def test_the_bound_is_of_moments_after_the_warm_up():
    assert moments_s(tiny(), 2) == (2.25, 4.75)
    requests = drawn(tiny())
    plain = simulate(tiny(), requests, "jsq", 0)
    bounded = simulate(tiny(), requests, "jsq", 0, moments=3)
    assert plain.bound is None
    assert bounded.bound is not None
    assert bounded.tpot_p50_ms == plain.tpot_p50_ms
    assert bounded.bound.best_ms < bounded.bound.placed_ms


def test_a_moment_has_the_requests_of_the_decoders_that_take_work():
    requests = drawn(tiny())
    simulation = Simulation(
        Topology(prefill=2, decode=4),
        *("jsq", {}, requests.shape, requests.top_k),
        changes=[Change(2.0, "drain", ("decode-000",)), Change(2.0, "fail", ("decode-001",))],
        moments_s=(1.9, 2.1),
    )
    before, after = simulation.run(requests.arrivals).moments
    assert len(before.step_times) == 4
    assert len(after.step_times) == 2
    assert set(after.on.tolist()) <= {0, 1}
    assert after.shares.shape[1:] == requests.shape
