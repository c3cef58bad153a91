import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fleets import SHAPE, booked, equal_fleet, place, request, view

from eldr.routing.contract import DecodeRequest, NoEligibleDecoderError
from eldr.routing.registry import Sources, make_policy
from eldr.routing.step_time import Observation, StepTimes
from eldr.routing.union_cost import UnionCost
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature


def touching(*experts, level=1.0):
    hit = np.zeros(SHAPE, np.float32)
    hit[:, list(experts)] = level
    return hit


def union_cost(**options):
    return UnionCost(StepTimes(), options)


def scores(decision):
    return {c.worker_id: c.score for c in decision.candidates}


def test_the_decoder_that_already_touches_the_experts_is_picked():
    fleet = (
        view("d0", 4, hit_frequency=touching(0, 1, 2, 3)),
        view("d1", 4, hit_frequency=touching(4, 5, 6, 7)),
    )
    assert union_cost().select(request("a", fake_signature((0, 1))), fleet).worker_id == "d0"
    assert union_cost().select(request("b", fake_signature((6, 7))), fleet).worker_id == "d1"


def test_the_score_is_the_marginal_cost_of_the_formula():
    """cost = T + dT + n * dT, T = a + b*n + c*u, dT = b + c*du (facts: "The marginal-union policy")."""
    fit = StepTimes().model("").coefficients
    hit = touching(0, 1, level=0.5)
    fleet = (view("d0", 3, hit_frequency=hit),)
    q = fake_signature((0, 1, 2, 3), tokens=32).shares()
    step = fit.base_s + fit.per_request_s * 3 + fit.per_union_s * hit.mean()
    added = fit.per_request_s + fit.per_union_s * ((1 - hit) * q).mean()
    decision = union_cost(power=1).select(request("r", fake_signature((0, 1, 2, 3), tokens=32)), fleet)
    assert scores(decision)["d0"] == pytest.approx(step + added + 3 * added, rel=1e-5)


def test_power_scores_the_growth_of_n_times_the_powered_step_time():
    fit = StepTimes().model("").coefficients
    hit = touching(0, 1, level=0.5)
    fleet = (view("d0", 3, hit_frequency=hit), view("d1", 5, hit_frequency=hit))
    q = fake_signature().shares()
    n = np.array([3.0, 5.0])
    before = fit.base_s + fit.per_request_s * n + fit.per_union_s * hit.mean()
    after = before + fit.per_request_s + fit.per_union_s * ((1 - hit) * q).mean()
    marginal = (n + 1) * after**8 - n * before**8
    decision = union_cost(power=8.0, power_load=0).select(request(), fleet)
    found = scores(decision)
    assert found["d1"] / found["d0"] == pytest.approx(marginal[1] / marginal[0], rel=1e-4)


@pytest.mark.parametrize(
    ("running", "power"), [((2, 2), 1.0), ((9, 15), 2.0), ((20, 28), 4.0), ((90, 99), 8.0)]
)
def test_power_grows_with_the_mean_load_of_those_that_take_work(running, power):
    """A quarter of `power_load` in flight on average: a quarter of `power`, never less than 1."""
    hit = touching(0, 1, level=0.5)
    fleet = (
        *(view(f"d{i}", n, hit_frequency=hit) for i, n in enumerate(running)),
        view("d9", 500, ineligible="draining", hit_frequency=hit),
    )
    grown = union_cost(power=8.0, power_load=48, max_load_ratio=0).select(request(), fleet)
    fixed = union_cost(power=power, power_load=0, max_load_ratio=0).select(request(), fleet)
    for worker_id in ("d0", "d1"):
        assert scores(grown)[worker_id] == pytest.approx(scores(fixed)[worker_id], rel=1e-9)


def test_unreported_bookings_count_as_if_they_ran():
    """survival = prod over unreported bookings of (1 - q) * (1 - h)."""
    fleet = (view("d0", 2, hit_frequency=touching(0, level=0.5)),)
    first = request("first", fake_signature((0, 1, 2, 3), tokens=32))
    policy = union_cost()
    before = policy.select(first, fleet).candidates[0].reason
    after = policy.select(first, booked(fleet, "d0", first)).candidates[0].reason
    fresh = union_cost().select(first, booked(fleet, "d0", first)).candidates[0].reason
    q = first.signature.shares()
    survival = (1 - touching(0, level=0.5)) * (1 - q)
    assert after == fresh != before
    assert f"union {(1 - survival).sum(axis=1).mean():.1f}" in after


def test_a_reported_booking_is_not_counted_twice():
    hit = touching(0, 1)
    asked = request("mine")
    fleet = booked((view("d0", 1, hit_frequency=hit),), "d0", asked)
    reported = (
        dataclasses.replace(
            fleet[0],
            state=dataclasses.replace(fleet[0].state, sequence=2, reservation_ids=frozenset({"mine"})),
        ),
    )
    assert fleet[0].in_flight == 2
    assert reported[0].in_flight == 1


def test_the_cache_gives_what_a_fresh_policy_gives():
    rng = np.random.default_rng(0)
    policy = union_cost()
    fleet = tuple(view(f"d{i}", 3, hit_frequency=rng.random(SHAPE).astype(np.float32)) for i in range(4))
    for i in range(60):
        asked = request(f"r{i}", fake_signature(tuple(rng.choice(8, 3, replace=False))))
        decision = policy.select(asked, fleet)
        assert scores(decision) == pytest.approx(scores(union_cost().select(asked, fleet)), rel=1e-5)
        fleet = booked(fleet, decision.worker_id, asked)
        if i % 7 == 3:
            target = fleet[i % 4]
            fleet = tuple(dataclasses.replace(v, bookings={}) if v is target else v for v in fleet)
        if i % 11 == 5:
            fleet = fleet[1:] + fleet[:1]
        if i % 13 == 6:
            fleet = (*fleet[:-1], view(fleet[-1].worker_id, 5, hit_frequency=touching(i % 8)))


def test_what_an_idle_decoder_still_reports_is_not_its_union():
    idle = view("d0", 0, hit_frequency=touching(0, 1, 2, 3, 4, 5, 6, 7))
    decision = union_cost().select(request(), (idle, view("d1", 0)))
    assert scores(decision)["d0"] == pytest.approx(scores(decision)["d1"])


def test_a_decoder_over_the_tail_guard_is_left_out_and_said_so():
    slow = view("d0", 10, hit_frequency=touching(*range(8)))
    quick = view("d1", 10, hit_frequency=touching(0, 1, 2, 3))
    fleet = (slow, quick)
    guarded = union_cost(power=1, tail_guard=0.05).select(request("r", fake_signature((4, 5))), fleet)
    assert guarded.worker_id == "d1"
    reasons = {c.worker_id: c.reason for c in guarded.candidates}
    assert reasons["d0"].endswith("the tail guard")


@st.composite
def loaded_fleets(draw):
    levels = st.sampled_from([0.1, 0.3, 0.5, 0.8, 1.0])
    return tuple(
        view(
            f"d{i}",
            draw(st.integers(1, 30)),
            hit_frequency=touching(*draw(st.sets(st.integers(0, 7), min_size=1)), level=draw(levels)),
            ineligible=draw(st.sampled_from(["", "", "draining", "stale 9.0 s"])),
        )
        for i in range(draw(st.integers(1, 6)))
    )


@given(
    fleet=loaded_fleets(),
    excluded=st.sets(st.sampled_from(["d0", "d1", "d2"])),
    options=st.sampled_from(
        [{"tail_guard": 0.05}, {"tail_guard": 0.001, "power": 1}, {"tail_guard": 2.0}, {}]
    ),
)
def test_guard_and_load_bound_look_only_at_those_that_may_take_work(fleet, excluded, options):
    asked = request(exclude=frozenset(excluded))
    able = tuple(v for v in fleet if not v.ineligible and v.worker_id not in excluded)
    if not able:
        with pytest.raises(NoEligibleDecoderError):
            union_cost(**options).select(asked, fleet)
        return
    decision = union_cost(**options).select(asked, fleet)
    alone = union_cost(**options).select(request(), able)
    # Equal up to the rounding of a product of fewer rows.
    costs = scores(alone)
    assert costs[decision.worker_id] == pytest.approx(costs[alone.worker_id], rel=1e-4)
    assert {c.worker_id for c in decision.candidates if c.eligible} == {
        c.worker_id for c in alone.candidates if c.eligible
    }


def test_the_guard_never_leaves_nobody():
    fleet = tuple(view(f"d{i}", 1, hit_frequency=touching(0)) for i in range(3))
    decision = union_cost(tail_guard=0.0001).select(request("r", fake_signature((4, 5, 6, 7))), fleet)
    assert any(c.eligible for c in decision.candidates)


def test_load_outweighs_similarity_where_the_gap_is_large():
    """Case 3.5: the similarity term cannot override a large load gap."""
    fleet = (
        view("d0", 30, hit_frequency=touching(0, 1)),
        view("d1", 5, hit_frequency=touching(4, 5, 6, 7)),
    )
    decision = union_cost(tail_guard=0.0).select(request("r", fake_signature((0, 1))), fleet)
    assert decision.worker_id == "d1"


def test_one_popular_signature_does_not_pin_the_fleet():
    """Case 3.6: all requests with the same signature, 8 workers, one already knows the experts."""
    fleet = (view("d0", 1, hit_frequency=touching(0, 1)), *equal_fleet(8)[1:])
    placed, _ = place(union_cost(), fleet, [request(f"r{i}") for i in range(64)])
    assert max(placed.values()) <= 2 * min(placed.values()) + 2


def test_unreported_signatures_steer_apart_what_does_not_overlap():
    """Two domains on four idle decoders end up on decoders of their own."""
    asked = [request(f"r{i}", fake_signature((0, 1) if i % 2 else (6, 7))) for i in range(64)]
    _, fleet = place(union_cost(), equal_fleet(4), asked)
    mixed = [
        min(share, 1 - share)
        for v in fleet
        if v.bookings
        for share in [np.mean([b.signature.counts[0, 0] > 0 for b in v.bookings.values()])]
    ]
    assert np.mean(mixed) < 0.2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_frequencies_of_another_shape_never_win(order):
    """Case 3.20: a score that is not finite loses, whatever the order of the workers."""
    wrong = view("d0", 1, hit_frequency=np.full((3, 8), 0.5, np.float32))
    fleet = (wrong, view("d1", 40, hit_frequency=touching(0)))
    decision = union_cost().select(request(), tuple(fleet[i] for i in order))
    assert (decision.worker_id, decision.fallback) == ("d1", "non-finite")


def test_no_finite_score_falls_back_to_load():
    wrong = np.full((3, 8), 0.5, np.float32)
    fleet = (view("d0", 9, hit_frequency=wrong), view("d1", 2, hit_frequency=wrong))
    decision = union_cost().select(request(), fleet)
    assert (decision.worker_id, decision.fallback) == ("d1", "non-finite")


def test_a_signature_of_no_tokens_adds_nothing_and_load_decides():
    """Case 3.20: an all-zero signature."""
    zero = ExpertSignature("fake-model", 2, 0, 0, np.zeros(FAKE_GEOMETRY.shape, np.uint32))
    fleet = (view("d0", 3), view("d1", 1))
    assert union_cost().select(DecodeRequest("r", zero), fleet).worker_id == "d1"


def test_any_number_of_decoders_will_do():
    for decoders in (1, 2, 17):
        placed, _ = place(union_cost(), equal_fleet(decoders), [request(f"r{i}") for i in range(34)])
        assert max(placed.values()) - min(placed.values()) <= 2


def test_groups_have_step_times_of_their_own():
    times = StepTimes()
    for n in range(1, 40):
        times.model("slow").observe(Observation(n, 0.5, 0.5, 10))
        times.model("fast").observe(Observation(n, 0.5, 0.005, 10))
    policy = make_policy("union-cost", {}, Sources(step_times=times))
    fleet = tuple(
        dataclasses.replace(view(name, 8, hit_frequency=touching(0, 1)), group=group)
        for name, group in (("d0", "slow"), ("d1", "fast"))
    )
    assert policy.select(request(), fleet).worker_id == "d1"
