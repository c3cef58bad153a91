import dataclasses

import pytest

from eldr.router.fleet import Fleet, FleetMismatchError, HealthLimits, Report, UnknownWorkerError
from eldr.routing.state import DecoderState
from eldr.rpc.worker_info import WorkerRole
from eldr.rpc.worker_status import WorkerHealth
from eldr.testing.fake_services import fake_info
from eldr.testing.signatures import FAKE_GEOMETRY

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


class Ended(list):
    """Worker ids whose process left the fleet."""


@pytest.fixture
def ended():
    return Ended()


@pytest.fixture
def fleet(ended):
    return Fleet(HealthLimits(stale_s=2.0, dead_s=10.0), on_end=ended.append)


def report(worker_id="d0", incarnation="d0-1", sequence=1, **changes):
    return DecoderState(worker_id, incarnation, sequence, **changes)


def ids(fleet, role=None):
    return [member.info.worker_id for member in fleet.members(role)]


def test_a_role_change_leaves_nothing_behind(fleet, ended):
    """Case 3.8: register A as prefill, again, then as decode at the same address; deregister once."""
    assert fleet.register(fake_info("a", PREFILL), 0.0)
    assert not fleet.register(fake_info("a", PREFILL), 1.0)
    assert fleet.register(fake_info("a", DECODE, incarnation="a-2"), 2.0)
    assert (ids(fleet), ids(fleet, PREFILL), ids(fleet, DECODE)) == (["a"], [], ["a"])
    assert ended == ["a"]
    assert fleet.remove("a")
    assert (ids(fleet), ids(fleet, PREFILL), ids(fleet, DECODE)) == ([], [], [])
    assert fleet.find("a") is None
    assert not fleet.remove("a")


def test_a_role_change_within_one_process_also_ends_the_old_entry(fleet, ended):
    fleet.register(fake_info("a", PREFILL), 0.0)
    fleet.register(fake_info("a", DECODE), 1.0)
    assert ended == ["a"]
    assert ids(fleet, PREFILL) == []


def test_another_name_at_the_same_address_replaces_the_old_one(fleet, ended):
    fleet.register(fake_info("old", DECODE, grpc_address="h:1"), 0.0)
    fleet.register(fake_info("new", DECODE, grpc_address="h:1"), 1.0)
    assert ids(fleet) == ["new"]
    assert ended == ["old"]


def test_a_restart_is_a_new_member_without_the_old_state(fleet, ended):
    fleet.register(fake_info("d0", DECODE), 0.0)
    fleet.report(report(running=9), 1.0)
    fleet.drain("d0")
    assert fleet.register(fake_info("d0", DECODE, incarnation="d0-2"), 2.0)
    member = fleet.member("d0")
    assert (member.state, member.draining, member.seen_s) == (None, False, None)
    assert ended == ["d0"]


def test_new_details_of_one_process_keep_its_state(fleet, ended):
    fleet.register(fake_info("d0", DECODE), 0.0)
    fleet.report(report(running=9), 1.0)
    assert fleet.register(fake_info("d0", DECODE, max_num_seqs=128), 2.0)
    assert fleet.member("d0").state.running == 9
    assert ended == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 32}, "block_size differs: worker b has 32, worker a has 16"),
        ({"kv_layout": "bfloat16"}, "kv_layout differs: worker b has 'bfloat16', worker a has 'float32'"),
        (
            {"geometry": dataclasses.replace(FAKE_GEOMETRY, fingerprint="other")},
            "fingerprint differs: worker b has other, worker a has fake-model",
        ),
        (
            {"geometry": dataclasses.replace(FAKE_GEOMETRY, experts=16)},
            "experts differs: worker b has 16, worker a has 8",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_both_values(fleet, changes, says):
    """Case 3.22: prefill and decode register with different block size, dtype or model."""
    fleet.register(fake_info("a", PREFILL), 0.0)
    with pytest.raises(FleetMismatchError, match=says):
        fleet.register(fake_info("b", DECODE, **changes), 0.0)
    assert ids(fleet) == ["a"]


def test_a_restart_that_no_longer_fits_ends_the_old_entry_too(fleet, ended):
    fleet.register(fake_info("a", PREFILL), 0.0)
    fleet.register(fake_info("b", DECODE), 0.0)
    with pytest.raises(FleetMismatchError):
        fleet.register(fake_info("b", DECODE, incarnation="b-2", block_size=32), 1.0)
    assert ids(fleet) == ["a"]
    assert ended == ["b"]


def test_the_only_worker_may_come_back_with_another_model(fleet):
    fleet.register(fake_info("a", DECODE), 0.0)
    assert fleet.register(fake_info("a", DECODE, incarnation="a-2", block_size=32), 1.0)


def test_a_removed_process_stays_out_until_it_restarts(fleet):
    fleet.register(fake_info("a", DECODE), 0.0)
    fleet.remove("a")
    with pytest.raises(FleetMismatchError, match="restart it"):
        fleet.register(fake_info("a", DECODE), 1.0)
    assert fleet.register(fake_info("a", DECODE, incarnation="a-2"), 2.0)


def test_health_follows_the_age_of_the_last_report(fleet):
    fleet.register(fake_info("d0", DECODE), 0.0)
    member = fleet.member("d0")
    assert fleet.health(member, 0.0) is WorkerHealth.STARTING
    fleet.report(report(), 1.0)
    expected = {1.0: "live", 3.0: "live", 3.1: "suspect", 11.0: "suspect", 11.1: "dead"}
    assert {now_s: fleet.health(member, now_s) for now_s in expected} == expected
    assert fleet.ineligible(member, 2.0) == ""
    assert fleet.ineligible(member, 4.2) == "stale 3.2 s"
    assert fleet.ineligible(member, 21.0) == "dead: silent 20.0 s"
    fleet.report(report(sequence=2), 30.0)
    assert fleet.health(member, 30.0) is WorkerHealth.LIVE


def test_the_age_that_a_report_claims_is_no_clock(fleet):
    """The contents of an idle decoder's report are old; the report itself is a sign of life."""
    fleet.register(fake_info("d0", DECODE), 0.0)
    fleet.report(report(age_s=500.0), 1.0)
    assert fleet.health(fleet.member("d0"), 1.0) is WorkerHealth.LIVE


def test_a_decoder_that_registers_and_never_reports_is_dead_in_the_end(fleet):
    fleet.register(fake_info("d0", DECODE), 0.0)
    for now_s in range(20):
        fleet.register(fake_info("d0", DECODE), float(now_s))
    member = fleet.member("d0")
    assert fleet.health(member, 20.0) is WorkerHealth.DEAD
    assert fleet.ineligible(member, 20.0).startswith("dead: no sign of life since it registered")


def test_registrations_are_the_signs_of_life_of_a_prefill_worker(fleet):
    fleet.register(fake_info("p0", PREFILL), 0.0)
    member = fleet.member("p0")
    assert fleet.health(member, 0.0) is WorkerHealth.LIVE
    assert fleet.health(member, 3.0) is WorkerHealth.SUSPECT
    fleet.register(fake_info("p0", PREFILL), 4.0)
    assert fleet.health(member, 5.0) is WorkerHealth.LIVE


def test_draining_by_the_operator_or_by_its_own_report(fleet):
    fleet.register(fake_info("d0", DECODE), 0.0)
    member = fleet.member("d0")
    fleet.report(report(draining=True), 0.0)
    assert fleet.ineligible(member, 0.0) == "draining"
    fleet.report(report(sequence=2), 0.0)
    assert fleet.ineligible(member, 0.0) == ""
    fleet.drain("d0")
    assert fleet.health(member, 0.0) is WorkerHealth.DRAINING
    with pytest.raises(UnknownWorkerError, match="no worker 'nobody' is registered"):
        fleet.drain("nobody")


def test_reports_out_of_order_or_of_another_process_are_not_taken(fleet):
    fleet.register(fake_info("d0", DECODE), 0.0)
    fleet.register(fake_info("p0", PREFILL), 0.0)
    assert fleet.report(report(sequence=5, running=5), 0.0) is Report.ACCEPTED
    assert fleet.report(report(sequence=4, running=4), 1.0) is Report.OUT_OF_ORDER
    assert fleet.report(report(incarnation="d0-0", sequence=9), 1.0) is Report.OTHER_INCARNATION
    assert fleet.report(report(worker_id="nobody"), 1.0) is Report.UNKNOWN_WORKER
    assert fleet.report(report(worker_id="p0", incarnation="p0-1"), 1.0) is Report.UNKNOWN_WORKER
    assert fleet.member("d0").state.running == 5


def test_the_generation_grows_with_membership_and_health(fleet):
    seen = [fleet.generation]

    def grew():
        seen.append(fleet.generation)
        return seen[-1] > seen[-2]

    fleet.register(fake_info("d0", DECODE), 0.0)
    assert grew()
    assert fleet.tick(0.0)
    assert grew()
    assert not fleet.tick(0.0)
    assert not grew()
    assert fleet.tick(20.0)
    assert grew()
    fleet.remove("d0")
    assert grew()


@pytest.mark.parametrize(("stale_s", "dead_s"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_limits_out_of_range_are_refused(stale_s, dead_s):
    with pytest.raises(ValueError, match="stale_s must be above 0"):
        HealthLimits(stale_s, dead_s)
