"""The router against fake workers on real ports."""

import dataclasses

import numpy as np
import pytest
from router_rig import served, silent_server, until

from eldr.client import NoWorkerError, Outcome
from eldr.router.fleet import HealthLimits
from eldr.router.settings import RouterSettings
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature

QUICK = RouterSettings(
    health=HealthLimits(stale_s=0.4, dead_s=1.0), report_period_s=0.05, probe_period_s=0.05
)


def by_id(server):
    return {status.info.worker_id: status for status in server.core.workers()}


def live(server, *worker_ids):
    found = by_id(server)
    return all(worker_id in found and found[worker_id].health == "live" for worker_id in worker_ids)


async def test_static_workers_are_found_whenever_they_come_up():
    """Case 3.17: one address that accepts and never answers delays no other."""
    late = FakePrefillWorker("p0")
    await late.start()
    await late.stop()
    async with silent_server() as hung, FakeDecodeWorker("d0") as early:
        addresses = (hung, early.address, late.address)
        async with served(dataclasses.replace(QUICK, workers=addresses)) as (server, client):
            await until(lambda: live(server, "d0"))
            assert "p0" not in by_id(server)
            await late.start()
            await until(lambda: live(server, "p0"))
            assert (await client.select_prefill()).worker.grpc_address == late.address
            await late.stop()


async def test_reports_reach_the_decision():
    d0, d1 = FakeDecodeWorker("d0"), FakeDecodeWorker("d1")
    async with served(dataclasses.replace(QUICK, policy="jsq"), d0, d1) as (server, client):
        d0.report(running=5)
        d1.report(running=2, hit_frequency=np.full(FAKE_GEOMETRY.shape, 0.25, np.float32))
        await until(lambda: live(server, "d0", "d1") and by_id(server)["d0"].state.running == 5)
        await until(lambda: by_id(server)["d1"].state.running == 2)
        booking = await client.reserve_decode(signature=fake_signature(), candidates=True)
        assert booking.worker.worker_id == "d1"
        assert {c.worker_id: c.in_flight for c in booking.decision.candidates} == {"d0": 5, "d1": 2}
        d1.report(running=3, reservation_ids=frozenset({booking.reservation_id}))
        await until(lambda: by_id(server)["d1"].state.running == 3)
        explained = await client.explain_decode(signature=fake_signature())
        assert {c.worker_id: c.in_flight for c in explained.candidates} == {"d0": 5, "d1": 3}
        assert await client.release_decode(booking.reservation_id, Outcome.COMPLETED, output_tokens=7)
        listed = {status.info.worker_id: status for status in await client.workers()}
        assert listed["d1"].state.hit_frequency is None
        assert listed["d1"].bookings == 0


async def test_a_restarted_decoder_joins_again_by_itself_and_soon():
    """Case 4.9: the worker is down for a while, then up; and its new process inherits no bookings."""
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: live(server, "d0"))
        await client.reserve_decode(signature=fake_signature())
        await worker.stop()
        await until(lambda: by_id(server)["d0"].health == "dead")
        with pytest.raises(NoWorkerError, match="d0: dead: silent"):
            await client.reserve_decode(signature=fake_signature())
        await worker.restart()
        assert await until(lambda: live(server, "d0")) < 3.0
        status = by_id(server)["d0"]
        assert (status.info.incarnation, status.bookings) == ("d0-2", 0)


async def test_a_broken_stream_is_read_again_from_its_beginning():
    """Case 3.18: the same process, a new stream, the whole state."""
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: live(server, "d0"))
        booking = await client.reserve_decode(signature=fake_signature())
        await worker.stop()
        worker.report(running=1, reservation_ids=frozenset({booking.reservation_id}))
        await worker.start()
        await until(lambda: by_id(server)["d0"].state.running == 1)
        assert by_id(server)["d0"].bookings == 1
        assert by_id(server)["d0"].info.incarnation == "d0-1"


async def test_a_decoder_that_goes_silent_is_stale_then_dead_then_back():
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: live(server, "d0"))
        worker.hang.add("WatchState")
        await until(lambda: by_id(server)["d0"].reason.startswith("stale"))
        with pytest.raises(NoWorkerError, match=r"d0: stale \d\.\d s"):
            await client.reserve_decode()
        await until(lambda: by_id(server)["d0"].health == "dead")
        worker.hang.clear()
        await until(lambda: live(server, "d0"))


async def test_a_prefill_worker_that_never_answers_goes_stale_alone():
    """Case 3.14 on the router's side."""
    async with (
        FakePrefillWorker("p0") as p0,
        FakePrefillWorker("p1") as p1,
        served(QUICK) as (server, client),
    ):
        await client.register(p0.info)
        await client.register(p1.info)
        p0.hang.add("GetInfo")
        await until(lambda: by_id(server)["p0"].reason.startswith("stale"))
        assert live(server, "p1")
        for i in range(8):
            assert (await client.select_prefill(prompt_prefix=b"%d" % i)).worker.worker_id == "p1"


async def test_a_role_change_at_one_address_leaves_no_link_behind():
    """Case 3.8 with real ports: the prefill entry and its link go, a decode stream comes."""
    prefill = FakePrefillWorker("a")
    await prefill.start()
    async with served(dataclasses.replace(QUICK, workers=(prefill.address,))) as (server, client):
        await until(lambda: live(server, "a"))
        await prefill.stop()
        decode = FakeDecodeWorker("a", incarnation="a-2", http_url=prefill.info.http_url)
        decode._port = prefill._port
        await decode.start()
        await until(lambda: live(server, "a") and by_id(server)["a"].info.role == "decode")
        assert decode.watchers == 1
        with pytest.raises(NoWorkerError, match="no prefill worker is registered"):
            await client.select_prefill()
        assert await client.remove("a")
        assert server.core.workers() == []
        await until(lambda: decode.watchers == 0)
        await decode.stop()


async def test_a_removed_worker_stays_out_until_it_restarts():
    worker = FakeDecodeWorker("d0")
    async with served(QUICK, worker) as (server, client):
        await until(lambda: live(server, "d0"))
        await client.remove("d0")
        calls = worker.calls["GetInfo"]
        await until(lambda: worker.calls["GetInfo"] >= calls + 3)
        assert by_id(server) == {}
        await worker.restart()
        await until(lambda: live(server, "d0"))


async def test_a_worker_of_another_model_stays_out_and_the_fleet_goes_on():
    other = dataclasses.replace(FAKE_GEOMETRY, fingerprint="other")
    async with FakeDecodeWorker("d0") as good, FakeDecodeWorker("d1", geometry=other) as bad:
        settings = dataclasses.replace(QUICK, workers=(good.address,))
        async with served(settings) as (server, _):
            await until(lambda: live(server, "d0"))
            server._links.search(bad.address)
            await until(lambda: bad.calls.get("GetInfo", 0) >= 2)
            assert set(by_id(server)) == {"d0"}
            await until(lambda: live(server, "d0"))
