"""Case 3.20 for every policy: what is not a finite number never wins, and nothing depends on the workers' order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fleets import SHAPE, TableLive, TableLocality, booked, equal_fleet, request, state, view

from eldr.routing.contract import DecodeRequest, DecoderView
from eldr.routing.registry import POLICIES, Sources, make_policy
from eldr.routing.state import StateError
from eldr.routing.step_time import Curve, StepTimes
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature

ODD = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 0.3, 0.9])
SCORED = {"jsq", "locality-band", "locality-band-online", "union-cost"}
ZERO = ExpertSignature("fake-model", 2, 0, 0, np.zeros(FAKE_GEOMETRY.shape, np.uint32))


@st.composite
def hostile_fleets(draw):
    """Reported frequencies of the right shape, of a wrong one, all zero, all one, or none."""
    fleet = []
    for i in range(draw(st.integers(1, 5))):
        shape = draw(st.sampled_from([SHAPE, (3, 8), (2, 4)]))
        level = draw(st.sampled_from([0.0, 0.5, 1.0, None]))
        hit = None if level is None else np.full(shape, level, np.float32)
        reported = state(f"d{i}", draw(st.integers(0, 20)), hit_frequency=hit)
        ineligible = draw(st.sampled_from(["", "", "", "dead"]))
        fleet.append(DecoderView(f"d{i}", reported, ineligible=ineligible))
    return tuple(fleet)


@given(
    fleet=hostile_fleets(),
    similarities=st.lists(ODD, min_size=1, max_size=6),
    signature=st.sampled_from([fake_signature(), ZERO]),
    order=st.randoms(use_true_random=False),
)
def test_what_is_not_finite_never_wins(fleet, similarities, signature, order):
    able = {each.worker_id for each in fleet if not each.ineligible}
    if not able:
        return
    shuffled = list(fleet)
    order.shuffle(shuffled)
    asked = DecodeRequest("r0", signature)
    for name in sorted(POLICIES):
        sources = Sources(locality=TableLocality(*similarities), live=TableLive(*similarities))
        decision = make_policy(name, {}, sources).select(asked, fleet)
        assert decision.worker_id in able
        scores = {each.worker_id: each.score for each in decision.candidates if each.eligible}
        if name in SCORED and not math.isfinite(scores[decision.worker_id]):
            assert decision.fallback
            assert not any(map(math.isfinite, scores.values()))
        again = make_policy(name, {}, sources).select(asked, tuple(shuffled))
        assert repr(again) == repr(decision)


@given(
    finite=st.integers(0, 3),
    odd=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_one_finite_similarity_is_enough_and_the_others_are_named(finite, odd):
    similarities = [odd] * 4
    similarities[finite] = 0.1
    sources = Sources(locality=TableLocality(*similarities), live=TableLive(*similarities))
    fleet = tuple(view(f"d{i}", 2) for i in range(4))
    for name in ("locality-band", "locality-band-online"):
        decision = make_policy(name, {"tau": 0.0}, sources).select(request(), fleet)
        assert (decision.worker_id, decision.fallback) == (f"d{finite}", "non-finite")


def test_a_step_time_that_is_not_finite_is_a_named_fallback_to_load(monkeypatch):
    times = StepTimes()
    broken, zero = np.full(256, math.nan), np.zeros(256)
    monkeypatch.setattr(times.model("bad"), "curve", lambda largest: Curve(broken, zero, zero, 0.0))
    hit = np.full(SHAPE, 0.5, np.float32)
    fleet = (
        DecoderView("d0", state("d0", 5, hit_frequency=hit), group="bad"),
        DecoderView("d1", state("d1", 2, hit_frequency=hit), group="good"),
    )
    decision = make_policy("union-cost", {}, Sources(step_times=times)).select(request(), fleet)
    assert (decision.worker_id, decision.fallback) == ("d1", "non-finite")


@pytest.mark.parametrize("odd", [math.nan, math.inf, -0.1, 1.5])
def test_frequencies_that_are_no_probabilities_make_no_report(odd):
    hit = np.full(SHAPE, 0.5, np.float32)
    hit[0, 3] = odd
    with pytest.raises(StateError, match="d0: hit_frequency"):
        state("d0", 1, hit_frequency=hit)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_booking_of_another_model_changes_no_decision(name):
    """Case 3.22: what is left of an incompatible pair."""
    fleet = equal_fleet(3)
    odd = ExpertSignature("other", 2, 8, 8, np.full((3, 8), 2, np.uint32))
    fleet = booked(fleet, "d1", DecodeRequest("old", odd))
    sources = Sources(locality=TableLocality(0.5, 0.5, 0.5), live=TableLive(0.5, 0.5, 0.5))
    decision = make_policy(name, {}, sources).select(request(), fleet)
    assert decision.fallback in ("", "no-domain")
