from pathlib import Path

import numpy as np
import pytest
from small_worlds import SHAPE, TOP_K, prompt, tiny

from eldr.simulator.compensation import Compensation
from eldr.simulator.runs import requests_of, simulate, world_of
from eldr.simulator.scenario import ScenarioError
from eldr.simulator.simulation import Arrival, Simulation, Topology


def views_after(compensation, arrivals):
    """Of the one decoder, after its requests were placed and before it reports again."""
    topology = Topology(prefill=1, decode=1, report_period_s=100.0, compensation=compensation)
    simulation = Simulation(topology, "union-cost", {}, SHAPE, TOP_K, until_s=1.0)
    simulation.run(arrivals)
    return simulation.core.views()


@pytest.mark.parametrize("compensation", list(Compensation))
def test_requests_count_as_load_whether_their_experts_are_seen_or_not(compensation):
    (view,) = views_after(compensation, [Arrival(0.1, "r", prompt(), 1000)])
    assert view.in_flight == 1
    (booking,) = view.bookings.values()
    assert (booking.signature is None) == (compensation is Compensation.NONE)
    assert compensation is Compensation.FULL or view.fresh == ()


@pytest.mark.parametrize("compensation", list(Compensation))
def test_an_unchanged_view_stays_the_same_object(compensation):
    topology = Topology(prefill=1, decode=2, compensation=compensation)
    simulation = Simulation(topology, "union-cost", {}, SHAPE, TOP_K)
    simulation.run([Arrival(0.1, "r", prompt(), 10)])
    assert all(a is b for a, b in zip(simulation.core.views(), simulation.core.views(), strict=True))


def test_a_scenario_names_its_compensation():
    assert tiny(fleet={"compensation": "none"}).fleet.compensation is Compensation.NONE
    with pytest.raises(ScenarioError, match="full, unreported, none, got 'some'"):
        tiny(fleet={"compensation": "some"})


def test_a_prefix_hit_saves_prefill_and_changes_no_signature():
    topology = {"prefill": 1, "decode": 1, "prefill_tokens_per_s": 10.0, "transfer_s": 0.0}
    first_s = []
    for hits in (0.0, 0.5):
        simulation = Simulation(Topology(**topology, prefix_hit_share=hits), "jsq", {}, SHAPE, TOP_K)
        ((_, request),) = simulation.run([Arrival(0.0, "r", prompt(tokens=10), 5)]).finished
        first_s.append(request.first_s)
    assert first_s[0] - first_s[1] == pytest.approx(0.5)
    with pytest.raises(ScenarioError, match="prefix_hit_share"):
        tiny(fleet={"prefix_hit_share": 1.5})


def test_signatures_of_a_part_of_the_prompt_are_noisier_and_say_so():
    errors, drawn = [], []
    for share in (1.0, 0.1):
        shape = {"layers": 3, "experts": 16, "top_k": 2, "subdomains": 2, "signed_share": share}
        scenario = tiny(world={"shape": shape})
        requests = requests_of(scenario, world_of(scenario, Path(".")), 0)
        signature = requests.arrivals[0].prompt.signature
        assert signature.covered_tokens == pytest.approx(share * signature.tokens, abs=0.5)
        errors.append(simulate(scenario, requests, "jsq", 0).share_error)
        drawn.append([arrival.prompt.shares for arrival in requests.arrivals])
    assert errors[1] > 1.2 * errors[0]
    assert all(np.array_equal(a, b) for a, b in zip(*drawn, strict=True))
