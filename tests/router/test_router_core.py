import math
from collections import Counter

import numpy as np
import pytest
from router_rig import CoreRig

from eldr.router.errors import NoWorkerError, UnknownModelError
from eldr.router.fleet import FleetMismatchError
from eldr.router.ledger import AlreadyReleasedError
from eldr.routing.contract import DecodeRequest, PolicyError
from eldr.routing.state import DecoderTotals
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import fake_info
from eldr.testing.signatures import fake_signature

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.fixture
def rig():
    rig = CoreRig(policy="jsq")
    rig.join("d0", "d1", "d2", "p0", "p1")
    return rig


def test_choosing_and_booking_are_one_step(rig):
    """Case 3.5: requests that arrive between two reports see each other."""
    placed = Counter(rig.reserve(f"r{i}") for i in range(30))
    assert set(placed.values()) == {10}


def test_cancelled_requests_leave_no_load_and_a_restarted_worker_is_not_flooded(rig):
    """Case 3.1: 100 requests cancelled at every point; loads 0; restart one worker and route 20."""
    for i in range(100):
        worker_id = rig.reserve(f"r{i}")
        if i % 3 == 0:
            rig.report(worker_id, running=1, reservation_ids=frozenset({f"r{i}"}))
        rig.core.release(DECODE, f"r{i}", Outcome.CANCELLED)
        rig.core.release(DECODE, f"r{i}", Outcome.CANCELLED)
    assert set(rig.loads().values()) == {0}
    for worker_id in ("d0", "d1", "d2"):
        rig.report(worker_id)
    rig.core.register(fake_info("d0", DECODE, incarnation="d0-2"))
    rig.report("d0", incarnation="d0-2", sequence=1)
    placed = Counter(rig.reserve(f"s{i}") for i in range(20))
    assert max(placed.values()) - min(placed.values()) <= 1


def test_a_replay_gives_the_same_answer_and_books_once(rig):
    first = rig.core.reserve_decode(DecodeRequest("r", fake_signature()))
    rig.clock.advance(2.0)
    again = rig.core.reserve_decode(DecodeRequest("r", None))
    assert again.worker == first.worker
    assert again.decision is first.decision
    assert again.expires_in_s == pytest.approx(first.expires_in_s - 2.0)
    assert sum(rig.loads().values()) == 1


def test_a_replayed_prefill_choice_books_once(rig):
    first = rig.core.select_prefill(b"prompt", reservation_id="r")
    again = rig.core.select_prefill(b"another", reservation_id="r")
    assert again.worker == first.worker
    assert sum(rig.loads().values()) == 1


def test_a_reservation_that_comes_after_its_release_is_refused(rig):
    rig.core.release(DECODE, "r", Outcome.CANCELLED)
    with pytest.raises(AlreadyReleasedError):
        rig.reserve("r")


def test_the_hand_off_ends_the_prefill_booking(rig):
    rig.core.select_prefill(b"prompt", reservation_id="p")
    rig.core.reserve_decode(DecodeRequest("d", fake_signature()), prefill_reservation_id="p")
    booked = [worker_id for worker_id, load in rig.loads().items() if load]
    assert booked in (["d0"], ["d1"], ["d2"])
    assert not rig.core.release(PREFILL, "p", Outcome.COMPLETED)


def test_without_a_decision_the_prefill_booking_stays(rig):
    rig.core.select_prefill(b"prompt", reservation_id="p")
    request = DecodeRequest("d", None, exclude=frozenset({"d0", "d1", "d2"}))
    with pytest.raises(NoWorkerError):
        rig.core.reserve_decode(request, prefill_reservation_id="p")
    assert sum(rig.loads().values()) == 1


def test_a_restarted_decoder_inherits_no_bookings(rig):
    for i in range(9):
        rig.reserve(f"r{i}")
    rig.core.register(fake_info("d1", DECODE, incarnation="d1-2"))
    assert rig.loads()["d1"] == 0
    assert rig.core.counters.value("eldr_reservations_dropped_total") == 3
    # Releases of the lost bookings find nothing, those of the others do.
    assert sum(rig.core.release(DECODE, f"r{i}", Outcome.WORKER_ERROR) for i in range(9)) == 6


def test_a_role_change_takes_the_bookings_of_the_old_role_along(rig):
    """Case 3.8."""
    for i in range(4):
        rig.core.select_prefill(f"{i}".encode(), reservation_id=f"r{i}")
    rig.core.register(fake_info("p0", DECODE, incarnation="p0-2"))
    rig.core.register(fake_info("p1", DECODE, incarnation="p1-2"))
    assert set(rig.loads().values()) == {0}
    with pytest.raises(NoWorkerError, match="no prefill worker is registered"):
        rig.core.select_prefill(b"prompt")


def test_bookings_expire_unless_a_report_carries_them(rig):
    """Case 2.28 on the router's own table."""
    worker_id = rig.reserve("carried")
    others = [rig.reserve(f"r{i}") for i in range(4)]
    assert others
    for _ in range(20):
        rig.clock.advance(3.0)
        for each in ("d0", "d1", "d2"):
            carried = frozenset({"carried"}) if each == worker_id else frozenset()
            rig.report(each, running=len(carried), reservation_ids=carried)
        rig.core.tick()
    assert rig.loads()[worker_id] == 1
    assert sum(rig.loads().values()) == 1
    assert rig.core.counters.value("eldr_reservations_expired_total", role="decode") == 4


def test_in_flight_is_what_was_reported_plus_what_the_report_does_not_contain(rig):
    rig.reserve("r0", exclude=frozenset({"d1", "d2"}))
    rig.reserve("r1", exclude=frozenset({"d1", "d2"}))
    rig.report("d0", running=3, waiting=1, reservation_ids=frozenset({"r0"}))
    view = {v.worker_id: v for v in rig.core.views()}["d0"]
    assert [booking.reservation_id for booking in view.unreported] == ["r1"]
    assert view.in_flight == 5


def test_views_are_kept_until_something_changes(rig):
    before = rig.core.views()
    assert all(a is b for a, b in zip(before, rig.core.views(), strict=True))
    worker_id = rig.reserve("r0")
    after = rig.core.views()
    assert {b.worker_id for a, b in zip(before, after, strict=True) if a is not b} == {worker_id}


def test_no_worker_is_said_with_a_reason_per_worker(rig):
    """Case 2.20: no prefill endpoint is an error of its own, never a silent decode-only run."""
    empty = CoreRig()
    with pytest.raises(NoWorkerError, match="no prefill worker is registered"):
        empty.core.select_prefill(b"")
    with pytest.raises(NoWorkerError, match="no decoder is registered"):
        empty.reserve()
    rig.core.drain("p0")
    with pytest.raises(NoWorkerError, match="p0: draining; p1: excluded by the caller"):
        rig.core.select_prefill(b"", exclude=frozenset({"p1"}))
    rig.clock.advance(6.0)
    with pytest.raises(NoWorkerError, match=r"d0: stale 6.0 s; d1: stale 6.0 s"):
        rig.reserve()
    assert rig.core.counters.value("eldr_no_worker_total", role="decode") == 1
    assert rig.core.counters.value("eldr_no_worker_total", role="prefill") == 1


@pytest.mark.parametrize("changes", [{"block_size": 32}, {"kv_layout": "float16"}])
def test_a_decoder_that_does_not_fit_the_prefill_workers_is_never_paired(changes):
    """Case 3.22: it is refused where it registers, not at the transfer, and no request waits for it."""
    rig = CoreRig()
    rig.join("p0", "d0")
    with pytest.raises(FleetMismatchError, match="worker d1 has"):
        rig.core.register(fake_info("d1", WorkerRole.DECODE, **changes))
    assert {rig.reserve(f"r{i}") for i in range(8)} == {"d0"}
    rig.core.remove("d0")
    with pytest.raises(NoWorkerError, match="no decoder is registered"):
        rig.reserve()


def test_a_removed_worker_is_not_picked(rig):
    """Case 3.11."""
    rig.core.remove("d1")
    assert {rig.reserve(f"r{i}") for i in range(10)} == {"d0", "d2"}


def test_an_unknown_model_is_not_found(rig):
    with pytest.raises(UnknownModelError, match="model 'gpt-9' is not served; served: fake"):
        rig.core.select_prefill(b"", model="gpt-9")
    with pytest.raises(UnknownModelError):
        rig.core.reserve_decode(DecodeRequest("r", None), model="gpt-9")
    assert rig.core.reserve_decode(DecodeRequest("r", None), model="fake")


def test_explaining_changes_nothing(rig):
    rig.core.models.set_policy("round-robin", {})
    explained = [rig.core.explain_decode(DecodeRequest("", fake_signature()))[0] for _ in range(3)]
    assert len({decision.worker_id for decision in explained}) == 1
    assert sum(rig.loads().values()) == 0
    assert rig.reserve("r") == explained[0].worker_id


def test_another_policy_can_be_asked(rig):
    decision, worker = rig.core.explain_decode(DecodeRequest("", fake_signature()), policy="union-cost")
    assert decision.policy == "union-cost"
    assert worker.worker_id == decision.worker_id
    assert rig.core.models.find("").policy[0] == "jsq"
    with pytest.raises(PolicyError, match="unknown policy"):
        rig.core.explain_decode(DecodeRequest("", None), policy="nope")


def test_explaining_without_an_eligible_decoder_still_says_why(rig):
    rig.core.drain("d0")
    request = DecodeRequest("", None, exclude=frozenset({"d1", "d2"}))
    decision, worker = rig.core.explain_decode(request)
    assert worker is None
    assert decision.worker_id == ""
    assert {c.worker_id: c.reason for c in decision.candidates} == {
        "d0": "draining",
        "d1": "excluded by the caller",
        "d2": "excluded by the caller",
    }


def test_fallbacks_and_signatures_are_counted(rig):
    rig.core.models.set_policy("union-cost", {})
    rig.core.reserve_decode(DecodeRequest("a", fake_signature()))
    rig.core.reserve_decode(DecodeRequest("b", None, signature_problem="bad-signature"))
    count = rig.core.counters.value
    assert count("eldr_signatures_total", result="ok") == 1
    assert count("eldr_signatures_total", result="bad-signature") == 1
    assert count("eldr_fallbacks_total", policy="union-cost", fallback="bad-signature") == 1


def test_reports_feed_the_step_time_model(rig):
    for steps in range(10, 400, 10):
        totals = DecoderTotals(steps, steps * 8, steps * 8 * 4.0, steps * 0.2)
        rig.report("d0", running=8, totals=totals)
    model = rig.core.models.find("").step_times.model("fake-1")
    fit = model.coefficients
    assert model.observations > 30
    assert fit.base_s + 8 * fit.per_request_s + 0.5 * fit.per_union_s == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize(("window_steps", "missing"), [(0, (15 / 16) ** 10), (4, (3 / 4) ** 10)])
def test_what_a_hit_frequency_misses_follows_the_window_that_the_decoder_says(window_steps, missing):
    rig = CoreRig()
    rig.join("d0", hit_window_steps=window_steps)
    rig.report("d0", totals=DecoderTotals(100))
    rig.reserve("r")
    rig.report("d0", running=1, reservation_ids=frozenset({"r"}), totals=DecoderTotals(120))
    (view,) = rig.core.views()
    assert [share for _, share in view.fresh] == [pytest.approx(missing)]


def test_frequencies_of_another_shape_are_dropped_and_counted(rig):
    rig.report("d0", running=1, hit_frequency=np.full((9, 9), 0.5, np.float32))
    view = {v.worker_id: v for v in rig.core.views()}["d0"]
    assert view.state.hit_frequency is None
    assert rig.core.counters.value("eldr_frequency_mismatches_total", worker_id="d0") == 1


def test_the_policy_switches_at_run_time_and_bookings_stay(rig):
    rig.reserve("r0")
    rig.core.models.set_policy("union-cost", {"tail_guard": 0.2})
    assert rig.core.models.find("").policy[0] == "union-cost"
    assert rig.core.models.find("").policy[1]["tail_guard"] == 0.2
    assert sum(rig.loads().values()) == 1
    with pytest.raises(PolicyError, match="needs a profile"):
        rig.core.models.set_policy("locality-band", {})
    assert rig.core.models.find("").policy[0] == "union-cost"


def test_ages_are_the_routers_own(rig):
    rig.clock.advance(1.5)
    ages = {status.info.worker_id: status.state_age_s for status in rig.core.workers()}
    assert ages["d0"] == pytest.approx(1.5)
    rig.core.register(fake_info("d9", DECODE))
    assert {s.info.worker_id: s.state_age_s for s in rig.core.workers()}["d9"] == -1.0
    assert all(math.isfinite(age) for age in ages.values())
