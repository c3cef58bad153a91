"""Breakers and silent workers behind the whole gateway, on real sockets."""

import asyncio
from dataclasses import replace

import pytest
from gateway_fleet import text_of

from eldr.client import FleetSnapshot, WorkerHealth
from eldr.gateway import watch
from eldr.gateway.counters import Event
from eldr.testing.clock import FakeClock
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "seed": 7}


async def test_a_worker_that_keeps_failing_is_left_alone_and_probed_later(make_fleet):
    clock = FakeClock()
    fleet = await make_fleet(breaker_failures=2, clock=clock)
    broken = fleet.decodes[0]
    broken.fault = Fault(FaultKind.RESET)
    for _ in range(10):
        assert (await fleet.complete(BODY))[0] == 200
    assert fleet.counts[Event.BREAKER_OPENED] == 1
    assert len(broken.requests) <= 3
    broken.fault = None
    seen = len(broken.requests)
    clock.advance(5.0)
    for _ in range(6):
        assert (await fleet.complete(BODY))[0] == 200
    assert len(broken.requests) > seen + 1
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_one_probe_at_a_time_goes_to_a_worker_that_failed(make_fleet):
    clock = FakeClock()
    fleet = await make_fleet(breaker_failures=1, clock=clock)
    broken = fleet.decodes[0]
    broken.fault = Fault(FaultKind.RESET)
    for _ in range(2):
        await fleet.complete(BODY)
    assert fleet.counts[Event.BREAKER_OPENED] == 1
    clock.advance(5.0)
    broken.fault = Fault(FaultKind.HANG)
    seen = len(broken.requests)
    probe = asyncio.create_task(fleet.complete(BODY))
    others = [asyncio.create_task(fleet.complete({**BODY, "seed": seed})) for seed in range(10)]
    await fleet.until(lambda: sum(task.done() for task in (probe, *others)) == 10)
    assert len(broken.requests) == seen + 1
    for task in (probe, *others):
        task.cancel()


async def test_requests_that_are_refused_open_no_breaker(make_fleet):
    """Case 3.12: ten over-long requests, then one good."""
    fleet = await make_fleet(breaker_failures=2)
    for _ in range(10):
        assert (await fleet.complete({**BODY, "max_tokens": 5000}))[0] == 400
    assert (await fleet.complete(BODY))[0] == 200
    assert fleet.counts[Event.BREAKER_OPENED] == 0


async def test_a_full_worker_is_used_again_as_soon_as_it_has_room(make_fleet):
    """Case 3.13."""
    fleet = await make_fleet(decodes=1, breaker_failures=2)
    fleet.decodes[0].faults.extend([Fault(FaultKind.STATUS, status=503)] * 5)
    statuses = [(await fleet.complete(BODY))[0] for _ in range(6)]
    assert statuses == [503] * 5 + [200]
    assert fleet.counts[Event.BREAKER_OPENED] == 0


async def test_a_wait_for_a_free_connection_says_nothing_about_the_worker(make_fleet):
    fleet = await make_fleet(decodes=1, connections_per_worker=1, connect_timeout_s=0.1, breaker_failures=1)
    pause = fleet.pause(fleet.decodes, "accepted")
    running = asyncio.create_task(fleet.complete(BODY))
    await pause.wait_reached()
    async with fleet.post("/v1/completions", BODY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    pause.go_on()
    assert (await running)[0] == 200
    assert (await fleet.complete(BODY))[0] == 200
    assert fleet.counts[Event.WORKER_FULL] == 1
    assert fleet.counts[Event.BREAKER_OPENED] == 0


async def test_all_workers_closed_off_is_a_503_and_not_a_wait(make_fleet):
    fleet = await make_fleet(prefills=1, breaker_failures=1, breaker_open_s=60.0, attempts=1)
    fleet.prefills[0].faults.append(Fault(FaultKind.STATUS, status=502))
    assert (await fleet.complete(BODY))[0] == 502
    status, reply = await fleet.complete(BODY)
    assert status == 503
    assert "no worker can take the request" in reply["error"]["message"]


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(watch, "TICK_S", 0.02)
    monkeypatch.setattr(watch, "SILENT_S", 0.05)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_worker_that_answers_no_health_check_is_given_up_and_the_request_served_elsewhere(
    make_fleet, quick_looks, monkeypatch, leg
):
    """A stopped process breaks no connection; a request that does not stream would wait for its whole limit."""
    fleet = await make_fleet(prefills=2, probe_after_s=0.1)
    stopped = (fleet.prefills if leg == "prefill" else fleet.decodes)[0]
    stopped.fault = Fault(FaultKind.HANG)
    asked = []

    async def alive(worker) -> bool:
        asked.append(worker.worker_id)
        return worker.worker_id != stopped.worker_id

    monkeypatch.setattr(fleet.coordinator.watch, "_probe", alive)
    for _ in range(2):
        status, reply = await fleet.complete(BODY)
        assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    assert asked.count(stopped.worker_id) == 2
    assert fleet.counts[Event.WORKER_LOST] == 1
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.transfers.stale_pulls == 0


async def test_a_slow_worker_that_is_well_keeps_its_request(make_fleet, quick_looks):
    fleet = await make_fleet(probe_after_s=0.05)
    pause = fleet.pause(fleet.decodes, "accepted")
    running = asyncio.create_task(fleet.complete(BODY))
    await pause.wait_reached()
    await asyncio.sleep(0.4)
    pause.go_on()
    assert (await running)[0] == 200
    assert fleet.counts[Event.WORKER_LOST] == 0


@pytest.mark.parametrize("how", ["dead", "restarted"])
async def test_the_routers_word_ends_waits_for_a_worker_that_is_gone(make_fleet, quick_looks, how):
    fleet = await make_fleet()
    hung = fleet.decodes[0]
    hung.fault = Fault(FaultKind.HANG)
    clients = [asyncio.create_task(fleet.complete({**BODY, "seed": seed})) for seed in range(2)]
    await fleet.until(lambda: len(hung.requests) == 1)
    await asyncio.sleep(0.06)
    workers = await fleet.router.workers()
    gone = next(worker for worker in workers if worker.info.worker_id == hung.worker_id)
    if how == "dead":
        now = replace(gone, health=WorkerHealth.DEAD)
    else:
        now = replace(gone, info=replace(gone.info, incarnation="i2"))
    await fleet.router.snapshots.put(FleetSnapshot(2, (now,)))
    assert [status for status, _ in await asyncio.gather(*clients)] == [200, 200]
    assert fleet.counts[Event.WORKER_LOST] == 1


async def test_a_stream_whose_worker_is_gone_ends_with_an_error_and_no_second_generation(
    make_fleet, quick_looks
):
    fleet = await make_fleet(decodes=2)
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.STALL, after_tokens=2)
    client = asyncio.create_task(fleet.stream(BODY))
    await fleet.until(lambda: sum(len(engine.requests) for engine in fleet.decodes) == 1)
    await asyncio.sleep(0.1)
    workers = await fleet.router.workers()
    dead = tuple(replace(worker, health=WorkerHealth.DEAD) for worker in workers)
    await fleet.router.snapshots.put(FleetSnapshot(2, dead))
    _, events = await client
    assert len(events) == 3
    assert '"code": 504' in events[-1]
    assert len(fleet.sent_to(fleet.decodes)) == 1
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_a_hand_off_that_grows_old_while_a_decoder_is_chosen_reaches_no_decoder(make_fleet):
    """A kept connection would take it at once, so its age is looked at and not left to the connection's limit."""
    fleet = await make_fleet(handoff_timeout_s=0.2)
    assert (await fleet.complete(BODY))[0] == 200
    reserve, slow = fleet.router.reserve_decode, [True]

    async def reserve_slowly(**query):
        if slow.pop() if slow else False:
            await asyncio.sleep(0.25)
        return await reserve(**query)

    fleet.router.reserve_decode = reserve_slowly
    status, reply = await fleet.complete(BODY)
    assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    await fleet.settled()
    assert fleet.counts[Event.HANDOFF_STALE] == 1
    assert len(fleet.sent_to(fleet.decodes)) == 2
    assert fleet.transfers.ended == {"pulled": 2, "released": 1}
    assert fleet.nothing_is_held()
