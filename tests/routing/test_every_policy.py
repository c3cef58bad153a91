"""What holds for every policy."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fleets import (
    SHAPE,
    TableLive,
    TableLocality,
    equal_fleet,
    every_policy,
    place,
    request,
    silent_view,
    state,
    view,
)

from eldr.routing.contract import Booking, DecoderView, NoEligibleDecoderError, PolicyError
from eldr.routing.registry import DEFAULT_POLICY, POLICIES, Sources, available, make_policy
from eldr.testing.signatures import fake_signature

NAMES = sorted(POLICIES)


def policy_named(name, seed=0, **options):
    similarities = (0.9, 0.8, 0.1, 0.0)
    sources = Sources(seed=seed, locality=TableLocality(*similarities), live=TableLive(*similarities))
    return make_policy(name, options, sources)


@st.composite
def decoders(draw):
    count = draw(st.integers(1, 6))
    fleet = []
    for i in range(count):
        running = draw(st.integers(0, 40))
        hit = None
        if draw(st.booleans()):
            level = draw(st.sampled_from([0.0, 0.3, 1.0]))
            hit = np.full(SHAPE, level, np.float32)
        bookings = {
            f"d{i}-b{j}": Booking(f"d{i}-b{j}", fake_signature((j % 8, (j + 1) % 8)))
            for j in range(draw(st.integers(0, 3)))
        }
        reported = draw(st.booleans())
        ineligible = draw(st.sampled_from(["", "", "draining", "stale 9.0 s"]))
        fleet.append(
            DecoderView(
                f"d{i}",
                state(f"d{i}", running, hit_frequency=hit) if reported else None,
                bookings,
                ineligible=ineligible,
            )
        )
    return tuple(fleet)


@given(fleet=decoders(), excluded=st.sets(st.sampled_from(["d0", "d1", "d2"])), signed=st.booleans())
def test_an_ineligible_or_excluded_decoder_is_never_picked(fleet, excluded, signed):
    asked = request(exclude=frozenset(excluded))
    if not signed:
        asked = type(asked)("r0", None, exclude=frozenset(excluded))
    able = {v.worker_id for v in fleet if not v.ineligible and v.worker_id not in excluded}
    for policy in every_policy(len(fleet)):
        if not able:
            with pytest.raises(NoEligibleDecoderError):
                policy.select(asked, fleet)
            continue
        decision = policy.select(asked, fleet)
        assert decision.worker_id in able
        by_id = {c.worker_id: c for c in decision.candidates}
        assert by_id.keys() == {v.worker_id for v in fleet}
        assert by_id[decision.worker_id].eligible
        assert not any(by_id[v.worker_id].eligible for v in fleet if v.worker_id not in able)


@given(fleet=decoders(), order=st.randoms(use_true_random=False), seed=st.integers(0, 5))
def test_the_decision_depends_on_the_seed_and_not_on_the_order_of_the_workers(fleet, order, seed):
    if all(v.ineligible for v in fleet):
        return
    shuffled = list(fleet)
    order.shuffle(shuffled)
    for name in NAMES:
        asked = request("r7")
        first = policy_named(name, seed).select(asked, fleet)
        again = policy_named(name, seed).select(asked, tuple(shuffled))
        assert repr(first) == repr(again)


@pytest.mark.parametrize("name", NAMES)
def test_a_shallow_copy_decides_without_effect_on_the_original(name):
    fleet, policy = equal_fleet(4), policy_named(name)
    policy.select(request("first"), fleet)
    dry = copy.copy(policy).select(request("second"), fleet)
    assert policy.select(request("second"), fleet).worker_id == dry.worker_id


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_every_decoder_and_its_reason(name):
    fleet = (view("d0", ineligible="draining"), view("d1"))
    with pytest.raises(NoEligibleDecoderError, match=r"d0: draining; d1: excluded by the caller") as caught:
        policy_named(name).select(request(exclude=frozenset({"d1"})), fleet)
    assert [c.worker_id for c in caught.value.candidates] == ["d0", "d1"]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_fleet_is_said_plainly(name):
    with pytest.raises(NoEligibleDecoderError, match="no decoder is registered"):
        policy_named(name).select(request(), ())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_decoder_that_comes_back_takes_the_work(name):
    """Case 3.15: none is registered, all are draining, one comes up."""
    policy, asked = policy_named(name), request()
    draining = tuple(view(f"d{i}", 3, ineligible="draining") for i in range(3))
    with pytest.raises(NoEligibleDecoderError, match="no decoder is registered"):
        policy.select(asked, ())
    with pytest.raises(NoEligibleDecoderError, match="d0: draining; d1: draining; d2: draining"):
        policy.select(asked, draining)
    assert policy.select(asked, (*draining, silent_view("d9"))).worker_id == "d9"
    assert policy.select(asked, (*draining[:2], view("d2", 3))).worker_id == "d2"


@pytest.mark.parametrize("name", ["jsq", "locality-band", "locality-band-online", "union-cost"])
def test_a_burst_between_two_reports_is_spread(name):
    """Case 3.5: 4 equal workers, reports frozen, 40 requests at once, identical signature."""
    placed, _ = place(policy_named(name), equal_fleet(4), [request(f"r{i}") for i in range(40)])
    assert max(placed.values()) <= 2 * min(placed.values())


@pytest.mark.parametrize("name", ["jsq", "p2c", "locality-band", "union-cost"])
def test_a_decoder_that_never_reported_is_neither_shunned_nor_flooded(name):
    """Case 3.7: 3 workers, one has never reported load."""
    hit = np.full(SHAPE, 0.4, np.float32)
    fleet = (
        silent_view("d0"),
        view("d1", 20, hit_frequency=hit),
        view("d2", 20, hit_frequency=hit),
    )
    placed, _ = place(policy_named(name), fleet, [request(f"r{i}") for i in range(30)])
    assert 5 <= placed["d0"] <= 15


@pytest.mark.parametrize("name", ["locality-band", "union-cost"])
@pytest.mark.parametrize("problem", ["no-signature", "bad-signature", "low-coverage"])
def test_without_a_usable_signature_load_decides_and_the_fallback_is_named(name, problem):
    """Case 3.20, and 1.17: no signal is never taken for a signal."""
    asked = request()
    asked = type(asked)("r0", None, signature_problem=problem)
    decision = policy_named(name).select(asked, (view("d0", 9), view("d1", 2), view("d2", 5)))
    assert decision.worker_id == "d1"
    assert decision.fallback == problem
    assert decision.policy == name


@pytest.mark.parametrize("name", ["random", "round-robin", "jsq", "p2c"])
def test_policies_that_need_no_signature_report_no_fallback(name):
    asked = request()
    decision = policy_named(name).select(type(asked)("r0", None), equal_fleet(3))
    assert decision.fallback == ""


def test_scores_are_lower_for_the_better_decoder():
    fleet = (view("d0", 9), view("d1", 2), view("d2", 5))
    for name in ("jsq", "union-cost"):
        decision = policy_named(name).select(request(), fleet)
        scores = {c.worker_id: c.score for c in decision.candidates if not math.isnan(c.score)}
        assert min(scores, key=scores.__getitem__) == decision.worker_id


def test_random_and_ties_reach_every_decoder():
    for name in ("random", "jsq", "p2c"):
        policy = policy_named(name, seed=3)
        reached = {policy.select(request(f"r{i}"), equal_fleet(4)).worker_id for i in range(100)}
        assert len(reached) == 4


def test_p2c_never_takes_the_most_loaded_of_three():
    policy = policy_named("p2c")
    fleet = (view("d0", 9), view("d1", 2), view("d2", 5))
    assert {policy.select(request(f"r{i}"), fleet).worker_id for i in range(60)} == {"d1", "d2"}


def test_round_robin_goes_on_where_decoders_come_and_go():
    policy = policy_named("round-robin")
    turns = [policy.select(request(), equal_fleet(3)).worker_id for _ in range(2)]
    turns.append(policy.select(request(), (view("d0"), view("d3"))).worker_id)
    turns.append(policy.select(request(), equal_fleet(3)).worker_id)
    assert turns == ["d0", "d1", "d3", "d0"]


def test_the_default_needs_no_profile():
    assert DEFAULT_POLICY in available(Sources())
    assert "locality-band" not in available(Sources())
    assert "locality-band" in available(Sources(locality=TableLocality(1.0)))
    assert "locality-band-online" not in available(Sources())
    assert "locality-band-online" in available(Sources(live=TableLive()))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("jqs", {}, "did you mean 'jsq'"),
        ("zzz", {}, "known: domain, jsq, locality-band"),
        ("jsq", {"tau": 1.0}, "unknown option 'tau', it takes none"),
        ("locality-band", {"tau": 3.0}, "tau must be 0 to 2, got 3"),
        ("union-cost", {"power": math.nan}, "power must be 0 to 32, got nan"),
        ("union-cost", {"tail_guard": math.inf}, "tail_guard must be"),
    ],
)
def test_a_wrong_policy_or_option_is_refused_by_name(name, options, says):
    with pytest.raises(PolicyError, match=says):
        policy_named(name, **options)


def test_the_band_without_a_profile_says_what_to_do():
    with pytest.raises(PolicyError, match="eldr fit"):
        make_policy("locality-band", {}, Sources())
