"""The gateway with a real router and real worker services; only the engines are fakes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from gateway_fleet import text_of

from eldr.client import RouterClient
from eldr.gateway import watch
from eldr.gateway.bookings import Releases
from eldr.gateway.coordinator import Coordinator
from eldr.gateway.counters import Counts, Event
from eldr.gateway.engine_client import EngineClient
from eldr.gateway.server import GatewayServer
from eldr.gateway.settings import GatewaySettings
from eldr.gateway.transfers import WorkerClients
from eldr.router.fleet import HealthLimits
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.rpc.codec import signature_to_text
from eldr.testing.fake_engine import FakeEngine, FakeTransfers
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.faults import Fault, FaultKind, Pause
from eldr.testing.signatures import fake_signature

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "seed": 7}


class HeldTransfers(set[str]):
    """What the prefill worker's gRPC service holds is what its engine holds."""

    def __init__(self, transfers: FakeTransfers) -> None:
        super().__init__()
        self._transfers = transfers

    def __contains__(self, transfer_id: object) -> bool:
        return self._transfers.find(str(transfer_id)) is not None

    def discard(self, transfer_id: str) -> None:
        self._transfers.end(transfer_id, "released")


class LiveFleet:
    """One prefill and three decode workers, a router, a gateway."""

    def __init__(self) -> None:
        self.transfers = FakeTransfers()
        self.prefill = FakeEngine("p0", self.transfers)
        self.decodes = [FakeEngine(f"d{index}", self.transfers) for index in range(3)]
        self.services: list[FakePrefillWorker | FakeDecodeWorker] = []
        self.counts = Counts()

    async def start(self, stack: contextlib.AsyncExitStack, **router) -> None:
        for engine in (self.prefill, *self.decodes):
            await stack.enter_async_context(engine)
        service = await stack.enter_async_context(FakePrefillWorker("p0", http_url=self.prefill.url))
        service.held = HeldTransfers(self.transfers)
        self.services.append(service)
        for engine in self.decodes:
            worker = FakeDecodeWorker(engine.worker_id, http_url=engine.url)
            self.services.append(await stack.enter_async_context(worker))
        server = RouterServer(
            RouterSettings(policy="jsq", workers=tuple(s.address for s in self.services), **router)
        )
        port = await server.start("127.0.0.1:0")
        stack.push_async_callback(server.stop, 0.0, 0.0)
        self.router = await stack.enter_async_context(RouterClient(f"127.0.0.1:{port}"))
        self.prefills = WorkerClients()
        stack.push_async_callback(self.prefills.close)
        self.releases = Releases(self.router, self.prefills.release_transfer, self.counts)
        settings = GatewaySettings()
        engines = EngineClient(settings, self.counts)
        stack.push_async_callback(engines.close)
        coordinator = Coordinator(engines, self.releases, settings, time.monotonic)
        self.server = GatewayServer(coordinator, self.releases, settings, "1.2.3")
        self.url = "http://" + await self.server.start("127.0.0.1", 0)
        stack.push_async_callback(self.server.stop, 0.0)
        self.http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        async for fleet in self.router.watch_fleet():
            if len(fleet.workers) == 4 and not any(worker.reason for worker in fleet.workers):
                break

    async def complete(self, body: dict) -> tuple[int, dict]:
        async with self.http.post(self.url + "/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def bookings(self) -> dict[str, int]:
        return {worker.info.worker_id: worker.bookings for worker in await self.router.workers()}


@pytest.fixture
async def live() -> AsyncIterator[LiveFleet]:
    async with contextlib.AsyncExitStack() as stack:
        fleet = LiveFleet()
        await fleet.start(stack)
        yield fleet


async def test_requests_are_served_and_no_booking_is_left(live):
    answers = await asyncio.gather(*(live.complete({**BODY, "seed": seed}) for seed in range(12)))
    assert {status for status, _ in answers} == {200}
    await live.releases.settled()
    assert set((await live.bookings()).values()) == {0}
    assert live.transfers.ended == {"pulled": 12}


async def test_the_signature_of_the_prefill_leg_steers_without_a_fallback(live):
    text = signature_to_text(fake_signature((2, 3), tokens=3))
    live.prefill.signature = lambda rendered: text
    await live.router.set_policy("union-cost")
    decisions = live.router.watch_decisions()
    first = asyncio.ensure_future(anext(decisions))
    while not first.done():
        assert (await live.complete(BODY))[0] == 200
    decision = (await first).decision
    assert (decision.policy, decision.fallback) == ("union-cost", "")
    await decisions.aclose()


async def test_a_text_that_is_no_signature_is_a_fallback_and_the_request_is_served(live):
    live.prefill.signature = lambda rendered: "no signature"
    assert (await live.complete(BODY))[0] == 200
    assert live.counts[Event.BAD_SIGNATURE] == 1


async def test_a_model_that_nobody_serves_is_a_404(live):
    status, reply = await live.complete({**BODY, "model": "other"})
    assert (status, reply["error"]["param"]) == (404, "model")
    assert "fake" in reply["error"]["message"]


@pytest.mark.parametrize("point", ["accepted", "headers", "token"])
async def test_a_hundred_clients_that_leave_leave_no_load_and_the_next_ones_spread(live, point):
    """Case 3.1: all loads 0, then a restarted decoder gets no more than its share of 21 requests."""
    pause = Pause()
    for engine in live.decodes:
        engine.pauses[point] = pause
    clients = []
    async with asyncio.timeout(60):
        for count in range(20, 101, 20):
            clients += [asyncio.create_task(live.complete({**BODY, "stream": True})) for _ in range(20)]
            await pause.wait_reached(count)
    assert sum((await live.bookings()).values()) == 100
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    async with asyncio.timeout(30):
        while live.counts[Event.CLIENT_GONE] < 100:  # noqa: ASYNC110 - the far end of a socket has no event
            await asyncio.sleep(0.01)
        await live.releases.settled()
    assert set((await live.bookings()).values()) == {0}
    assert not live.transfers.held

    await live.services[1].restart()
    restarted = live.services[1].info.incarnation
    async for fleet in live.router.watch_fleet():
        known = {worker.info.incarnation for worker in fleet.workers if not worker.reason}
        if len(known) == 4 and restarted in known:
            break
    pause = Pause()
    for engine in live.decodes:
        engine.requests.clear()
        engine.pauses = {"accepted": pause}
    clients = [asyncio.create_task(live.complete(BODY)) for _ in range(21)]
    async with asyncio.timeout(60):
        await pause.wait_reached(21)
    loads = [len(engine.requests) for engine in live.decodes]
    assert sum(loads) == 21
    assert max(loads) - min(loads) <= 2, loads
    pause.go_on()
    assert {status for status, _ in await asyncio.gather(*clients)} == {200}


async def test_a_hand_off_that_no_decoder_took_is_released_over_grpc(live):
    """Cases 2.2 and 2.30."""
    for engine in live.decodes:
        await engine.stop()
    status, reply = await live.complete(BODY)
    assert status == 502
    assert "worker d" in reply["error"]["message"]
    await live.releases.settled()
    assert live.transfers.ended == {"released": 1}
    assert live.services[0].calls["ReleaseTransfer"] == 1
    assert set((await live.bookings()).values()) == {0}


async def test_a_transfer_of_an_earlier_process_is_not_released_in_a_later_one(live):
    prefill = live.services[0]
    live.transfers.hold("t1", "prompt")
    assert not await live.prefills.release_transfer(prefill.address, "t1", "an-earlier-process")
    assert await live.prefills.release_transfer(prefill.address, "t1", prefill.info.incarnation)


async def test_outputs_do_not_depend_on_which_decoder_failed_before(live):
    want = text_of((await live.complete(BODY))[1])
    live.decodes[0].fault = Fault(FaultKind.STATUS, status=503)
    live.decodes[1].fault = Fault(FaultKind.RESET)
    for _ in range(6):
        status, reply = await live.complete(BODY)
        assert (status, text_of(reply)) == (200, want)
    assert live.transfers.stale_pulls == 0


async def test_a_request_at_a_decoder_that_the_router_finds_dead_is_served_by_another(monkeypatch):
    """A stopped process: its connections stand, its reports end, and no time limit of the request is near."""
    monkeypatch.setattr(watch, "SILENT_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        fleet = LiveFleet()
        await fleet.start(stack, health=HealthLimits(stale_s=1.5, dead_s=2.0))
        hang = Pause()
        for engine in fleet.decodes:
            engine.pauses["accepted"] = hang
        client = asyncio.create_task(fleet.complete(BODY))
        await hang.wait_reached()
        stopped = next(index for index, engine in enumerate(fleet.decodes) if engine.requests)
        for engine in fleet.decodes:
            engine.pauses.clear()
        await fleet.services[1 + stopped].stop()
        assert (await client)[0] == 200
        assert fleet.counts[Event.WORKER_LOST] == 1
        await fleet.releases.settled()
        assert set((await fleet.bookings()).values()) == {0}
