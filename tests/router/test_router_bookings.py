"""Bookings end on every path, and what decoders report corrects what the router believes."""

import asyncio
import gc

import pytest
from router_rig import CoreRig, served, until

from eldr.client import Outcome, RouterError
from eldr.router.ledger import LEFT_S
from eldr.router.settings import RouterSettings
from eldr.routing.contract import DecodeRequest
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import FakeDecodeWorker, fake_info
from eldr.testing.signatures import fake_signature

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.fixture
def rig():
    rig = CoreRig(policy="jsq")
    rig.join("d0", "d1", "d2", "p0", "p1")
    return rig


def held(rig):
    """Entries of every map of the router that grows with requests."""
    core = rig.core
    return {
        "bookings": sum(rig.loads().values()),
        "decode": len(core._ledgers[DECODE]),
        "prefill": len(core._ledgers[PREFILL]),
        "viewed": sum(len(view.bookings) for view in core.views()),
        "fresh": sum(len(view.fresh) for view in core.views()),
    }


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_gives_the_booking_back(rig, outcome):
    rig.core.select_prefill(b"x", reservation_id="p")
    rig.reserve("d")
    assert rig.core.release(PREFILL, "p", outcome)
    assert rig.core.release(DECODE, "d", outcome)
    assert set(held(rig).values()) == {0}
    assert rig.core.counters.value("eldr_releases_total", role="decode", outcome=outcome.value) == 1


def test_five_thousand_requests_of_every_fate_leave_nothing_behind(rig):
    """Case 3.3: served, aborted, failed, forgotten by their gateway, expired, and on a worker that restarts."""
    outcomes = list(Outcome)
    for i in range(5000):
        rig.clock.advance(0.02)
        rig.core.select_prefill(b"%d" % i, reservation_id=f"p{i}")
        worker_id = rig.reserve(f"d{i}") if i % 7 else ""
        fate = i % 5
        if fate == 0 and worker_id:
            rig.report(
                worker_id,
                incarnation=rig.core.fleet.member(worker_id).info.incarnation,
                running=1,
                reservation_ids=frozenset({f"d{i}"}),
            )
        if fate < 3:
            rig.core.release(PREFILL, f"p{i}", outcomes[i % len(outcomes)])
            rig.core.release(DECODE, f"d{i}", outcomes[i % len(outcomes)])
        if i % 500 == 250:
            rig.core.register(fake_info("d1", DECODE, incarnation=f"d1-{i}"))
        if i % 10 == 0:
            for name in ("d0", "d1", "d2"):
                rig.report(name, incarnation=rig.core.fleet.member(name).info.incarnation)
            for name in ("p0", "p1"):
                rig.core.register(fake_info(name, PREFILL))
            rig.core.tick()
    for _ in range(150):
        rig.clock.advance(1.0)
        for name in ("d0", "d1", "d2"):
            rig.report(name, incarnation=rig.core.fleet.member(name).info.incarnation)
        rig.core.tick()
    assert set(held(rig).values()) == {0}
    assert {len(ledger._released) for ledger in rig.core._ledgers.values()} == {0}


def test_a_gateway_that_dies_leaves_no_load_once_the_engine_is_done(rig):
    """Its release never comes. The reports carry the request, then no longer: soon after, the booking is over."""
    worker_id = rig.reserve("r")
    for _ in range(100):
        rig.clock.advance(0.5)
        rig.report(worker_id, running=1, reservation_ids=frozenset({"r"}))
        rig.core.tick()
    assert rig.loads()[worker_id] == 1
    rig.report(worker_id)
    rig.clock.advance(LEFT_S)
    rig.core.tick()
    assert rig.loads()[worker_id] == 0
    assert rig.core.counters.value("eldr_reservations_expired_total", role="decode") == 1


def test_a_replay_after_the_booked_worker_is_gone_books_another(rig):
    first = rig.reserve("r")
    rig.core.remove(first)
    second = rig.reserve("r")
    assert second != first
    assert sum(rig.loads().values()) == 1


def test_a_restart_between_booking_and_replay_never_answers_with_the_dead_process(rig):
    """Case 3.10: the answer names the process that is meant."""
    first = rig.core.reserve_decode(DecodeRequest("r", None)).worker
    rig.core.register(fake_info(first.worker_id, DECODE, incarnation="again"))
    second = rig.core.reserve_decode(DecodeRequest("r", None)).worker
    assert (second.worker_id, second.incarnation) != (first.worker_id, first.incarnation)


async def test_replays_at_once_book_once():
    async with served(RouterSettings(policy="jsq")) as (server, client):
        for worker_id in ("d0", "d1", "d2"):
            server.core.register(fake_info(worker_id, DECODE))
        calls = (client.reserve_decode(reservation_id="r", signature=fake_signature()) for _ in range(20))
        answers = await asyncio.gather(*calls)
        assert len({answer.worker.worker_id for answer in answers}) == 1
        assert sum(status.bookings for status in server.core.workers()) == 1
        assert await client.release_decode("r", Outcome.CANCELLED)
        assert not await client.release_decode("r", Outcome.CANCELLED)


async def test_callers_that_hang_up_before_the_answer_leave_bookings_that_their_release_ends():
    """Case 3.1, ask 13: the release may overtake the reservation, and then nothing is booked."""
    async with served(RouterSettings(policy="jsq")) as (server, client):
        server.core.register(fake_info("d0", DECODE))
        for i in range(50):
            call = asyncio.create_task(client.reserve_decode(reservation_id=f"r{i}"))
            await asyncio.sleep(0 if i % 2 else 0.001)
            call.cancel()
            await client.release_decode(f"r{i}", Outcome.CANCELLED)
        for i in range(50):
            with pytest.raises(RouterError, match="already released"):
                await client.reserve_decode(reservation_id=f"r{i}")
        assert sum(status.bookings for status in server.core.workers()) == 0


async def test_a_worker_that_never_answers_its_drain_holds_one_call(rig):
    """Case 7.6: 1,000 orders for a worker that does not answer are one operation in flight."""
    worker = FakeDecodeWorker("d0")
    async with served(RouterSettings(probe_period_s=0.05), worker) as (server, client):
        await until(lambda: [s.health for s in server.core.workers()] == ["live"])
        worker.hang.add("Drain")
        for _ in range(200):
            await client.drain("d0", limit_s=600.0)
        gc.collect()
        assert worker.calls["Drain"] <= 1
        assert sum(task.get_name() == "drain d0" for task in asyncio.all_tasks()) == 1
