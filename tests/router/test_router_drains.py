"""Draining in two phases: no new work, then gone once nothing is left to do, or when the limit is over."""

import dataclasses

import pytest
from router_rig import CoreRig, served, until

from eldr.router.drains import SETTLE_S, DrainEnd, Drains
from eldr.router.errors import NoWorkerError
from eldr.router.fleet import HealthLimits
from eldr.router.settings import RouterSettings
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker, fake_info
from eldr.testing.signatures import fake_signature

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
QUICK = RouterSettings(
    health=HealthLimits(stale_s=0.4, dead_s=1.0), report_period_s=0.05, probe_period_s=0.05
)


@pytest.fixture
def rig():
    rig = CoreRig(policy="jsq")
    rig.join("d0", "d1", "p0")
    return rig


def pass_time(rig, seconds, **reports):
    """Ticks each half second, with a report of d1 as it is and one of d0 as told."""
    for _ in range(round(2 * seconds)):
        rig.clock.advance(0.5)
        rig.report("d1")
        if "d0" in {status.info.worker_id for status in rig.core.workers()}:
            rig.report("d0", draining=True, **reports)
        rig.core.tick()


def ids(rig):
    return [status.info.worker_id for status in rig.core.workers()]


def test_a_worker_counts_as_done_only_after_it_has_been_idle_for_a_while():
    drains = Drains(settle_s=2.0)
    drains.begin("d0", 60.0, 0.0)
    assert drains.over(0.0, lambda _: True) == []
    assert drains.over(1.0, lambda _: False) == []
    assert drains.over(2.0, lambda _: True) == []
    assert drains.over(3.9, lambda _: True) == []
    assert drains.over(4.0, lambda _: True) == [("d0", DrainEnd.EMPTY)]


def test_a_busy_worker_goes_at_its_limit_and_a_second_call_moves_it():
    drains = Drains()
    drains.begin("d0", 10.0, 0.0)
    drains.begin("d0", 10.0, 5.0)
    assert drains.over(14.9, lambda _: False) == []
    assert drains.over(15.0, lambda _: False) == [("d0", DrainEnd.LIMIT)]
    drains.forget("d0")
    assert drains.over(99.0, lambda _: True) == []


def test_a_drained_decoder_gets_no_new_work_finishes_and_is_gone(rig):
    booked = [rid for rid in ("r0", "r1", "r2", "r3") if rig.reserve(rid) == "d0"]
    rig.core.drain("d0", limit_s=300.0)
    assert {rig.reserve(f"s{i}") for i in range(6)} == {"d1"}
    pass_time(rig, 20, running=1, reservation_ids=frozenset(booked))
    assert "d0" in ids(rig)
    for rid in booked:
        rig.core.release(DECODE, rid, Outcome.COMPLETED)
    # Another router's request is still there.
    pass_time(rig, 20, running=1)
    assert "d0" in ids(rig)
    pass_time(rig, SETTLE_S + 1)
    assert ids(rig) == ["d1", "p0"]
    assert rig.core.counters.value("eldr_drains_total", end="empty") == 1


def test_a_drained_prefill_worker_waits_for_its_hand_offs(rig):
    """Case 2.2 and ask 18: what waits there for a decoder would be lost with it."""
    info = fake_info("p0", PREFILL)
    rig.core.drain("p0", limit_s=300.0)
    with pytest.raises(NoWorkerError, match="p0: draining"):
        rig.core.select_prefill(b"")
    for held in (2, 2, 2, 2, 1, 1, 1):
        rig.core.register(info)
        rig.core.held(info, held)
        pass_time(rig, 1)
    assert "p0" in ids(rig)
    rig.core.held(info, 0)
    pass_time(rig, SETTLE_S + 1)
    assert "p0" not in ids(rig)


def test_at_the_limit_a_busy_worker_is_gone_with_its_bookings(rig):
    for i in range(4):
        rig.reserve(f"r{i}")
    rig.core.drain("d0", limit_s=5.0)
    pass_time(rig, 6, running=2, reservation_ids=frozenset({"r0", "r1", "r2", "r3"}))
    assert "d0" not in ids(rig)
    assert sum(rig.loads().values()) == 2
    assert rig.core.counters.value("eldr_drains_total", end="limit") == 1


def test_the_drained_process_stays_out_and_its_restart_joins_without_the_drain(rig):
    rig.core.drain("d0", limit_s=0.0)
    assert "d0" not in ids(rig)
    rig.core.register(fake_info("d0", DECODE, incarnation="d0-2"))
    rig.report("d0", incarnation="d0-2", sequence=1)
    rig.clock.advance(3.0)
    rig.core.tick()
    assert {status.info.worker_id: status.reason for status in rig.core.workers()}["d0"] == ""


def test_a_worker_that_dies_while_it_drains_is_gone_at_once(rig):
    rig.core.drain("d0", limit_s=1e6)
    for _ in range(40):
        rig.clock.advance(1.0)
        rig.report("d1")
        rig.core.tick()
    assert "d0" not in ids(rig)


async def test_the_engine_itself_reports_that_it_drains():
    """So that a second router, which nobody has told, leaves the worker alone within a report."""
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (first, client):
        await until(lambda: [s.health for s in first.core.workers()] == ["live"])
        settings = dataclasses.replace(QUICK, workers=(worker.address,))
        async with served(settings) as (second, _):
            await until(lambda: [s.health for s in second.core.workers()] == ["live"])
            booking = await client.reserve_decode(signature=fake_signature())
            worker.report(running=1, reservation_ids=frozenset({booking.reservation_id}))
            assert await client.drain("d0", limit_s=60.0) == 1
            await until(lambda: worker.state.draining)
            await until(lambda: [s.reason for s in second.core.workers()] == ["draining"])
            assert worker.calls["Drain"] == 1
            await client.release_decode(booking.reservation_id, Outcome.COMPLETED)
            worker.report(running=0, reservation_ids=frozenset())
            await until(lambda: first.core.workers() == [], SETTLE_S + 2)


async def test_an_engine_that_cannot_be_reached_is_told_again():
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: [s.health for s in server.core.workers()] == ["live"])
        await worker.stop()
        await client.drain("d0", limit_s=60.0)
        await until(lambda: server.core.counters.total("eldr_link_errors_total") > 1)
        await worker.start()
        await until(lambda: worker.state.draining)


async def test_a_prefill_workers_hand_offs_are_seen_by_the_probe():
    worker = FakePrefillWorker("p0")
    worker.hand_off("t0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: bool(server.core.workers()) and server.core.fleet.member("p0").held == 1)
        await client.drain("p0", limit_s=60.0)
        worker.held.clear()
        await until(lambda: server.core.workers() == [], SETTLE_S + 2)
