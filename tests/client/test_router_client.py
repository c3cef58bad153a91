"""The typed client against real routers in this process."""

import asyncio
import time

import grpc
import pytest

from eldr.client import (
    CodecError,
    NoWorkerError,
    Outcome,
    RouterClient,
    RouterError,
    RouterUnreachableError,
    WorkerHealth,
    WorkerRole,
)
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.rpc.codec import signature_to_text
from eldr.testing.fake_services import fake_info
from eldr.testing.signatures import fake_signature

DECODE, PREFILL = WorkerRole.DECODE, WorkerRole.PREFILL
NOWHERE = "127.0.0.1:1"


class Routers:
    """Routers on free ports."""

    def __init__(self):
        self.servers = []

    async def start(self, *worker_ids):
        server = RouterServer(RouterSettings(policy="jsq"))
        port = await server.start("127.0.0.1:0")
        self.servers.append(server)
        for worker_id in worker_ids:
            server.core.register(fake_info(worker_id, DECODE if worker_id[0] == "d" else PREFILL))
        return server, f"127.0.0.1:{port}"

    async def stop(self):
        for server in self.servers:
            await server.stop(grace_s=0.1)


@pytest.fixture
async def routers():
    routers = Routers()
    yield routers
    await routers.stop()


async def test_a_request_goes_through_both_bookings(routers):
    _, address = await routers.start("p0", "d0")
    async with RouterClient(address) as client:
        prefill = await client.select_prefill(model="fake", prompt_prefix=b"def f(")
        assert prefill.worker.http_url == "http://p0.fake:8000"
        assert prefill.worker.incarnation == "p0-1"
        assert prefill.expires_in_s == pytest.approx(120.0)
        decode = await client.reserve_decode(
            signature=fake_signature(),
            prompt_tokens=32,
            max_tokens=64,
            prefill_reservation_id=prefill.reservation_id,
        )
        assert decode.worker.worker_id == decode.decision.worker_id == "d0"
        assert decode.decision.policy == "jsq"
        assert not await client.release_prefill(prefill.reservation_id, Outcome.COMPLETED)
        assert [status.bookings for status in await client.workers()] == [1, 0]
        assert await client.release_decode(decode.reservation_id, Outcome.COMPLETED, output_tokens=5)
        assert not await client.release_decode(decode.reservation_id, Outcome.COMPLETED)
        assert [status.bookings for status in await client.workers()] == [0, 0]


async def test_each_booking_gets_an_id_of_its_own(routers):
    """Case 2.15: ids are the client's own, never the user's."""
    _, address = await routers.start("d0")
    async with RouterClient(address) as client:
        ids = [(await client.reserve_decode()).reservation_id for _ in range(3)]
        assert len(set(ids)) == 3
        again = await client.reserve_decode(reservation_id=ids[0])
        assert again.reservation_id == ids[0]
        assert (await client.workers())[0].bookings == 3


async def test_the_signature_travels_as_the_text_of_the_hand_off(routers):
    server, address = await routers.start("d0")
    async with RouterClient(address) as client:
        await client.reserve_decode(signature=signature_to_text(fake_signature()))
        assert server.core.counters.value("eldr_signatures_total", result="ok") == 1
        with pytest.raises(CodecError, match="not base64"):
            await client.reserve_decode(signature="%%%")
        with pytest.raises(CodecError, match="expected base64 text, got int"):
            await client.reserve_decode(signature=5)


async def test_the_next_router_is_asked_where_one_is_unreachable(routers):
    _, address = await routers.start("d0")
    async with RouterClient([NOWHERE, address]) as client:
        assert (await client.reserve_decode()).worker.worker_id == "d0"
        stream = client.watch_fleet()
        assert len((await anext(stream)).workers) == 1
        await stream.aclose()


async def test_a_router_that_goes_away_is_replaced_by_the_next(routers):
    first, one = await routers.start("d0")
    _, two = await routers.start("d1")
    async with RouterClient([one, two]) as client:
        assert (await client.reserve_decode()).worker.worker_id == "d0"
        await first.stop(grace_s=0.0)
        assert (await client.reserve_decode()).worker.worker_id == "d1"
        assert (await client.reserve_decode()).worker.worker_id == "d1"


async def test_where_one_router_knows_no_worker_the_next_is_asked(routers):
    """One that has just started knows none yet; no request is lost for that."""
    _, empty = await routers.start()
    _, full = await routers.start("d0")
    async with RouterClient([empty, full]) as client:
        assert (await client.reserve_decode()).worker.worker_id == "d0"
    async with RouterClient([empty, NOWHERE]) as client:
        with pytest.raises(NoWorkerError, match="no decoder is registered"):
            await client.reserve_decode()


async def test_a_router_that_hangs_takes_its_share_of_the_time_and_is_asked_last_from_then_on(routers):
    _, address = await routers.start("d0")

    async def swallow(reader, writer):
        await reader.read()
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        hung = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = RouterClient([hung, address], timeout_s=1.0)
        begun_s = time.monotonic()
        assert (await client.reserve_decode()).worker.worker_id == "d0"
        assert 0.4 < time.monotonic() - begun_s < 1.0
        begun_s = time.monotonic()
        assert await client.workers()
        assert time.monotonic() - begun_s < 0.4
        await client.close()
        server.close()


async def test_a_router_that_is_slow_to_shake_hands_is_not_taken_for_unreachable(routers):
    """A busy machine needs more than a moment for the first bytes."""
    _, address = await routers.start("d0")
    host, port = address.split(":")

    async def copy(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def slowly(reader, writer):
        await asyncio.sleep(0.5)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    async with await asyncio.start_server(slowly, "127.0.0.1", 0) as proxy:
        near = proxy.sockets[0].getsockname()[1]
        async with RouterClient(f"127.0.0.1:{near}") as client:
            assert len(await client.workers()) == 1


async def test_nobody_reachable_is_said_so_and_soon():
    async with RouterClient([NOWHERE, "127.0.0.1:2"], timeout_s=2.0) as client:
        begun_s = time.monotonic()
        with pytest.raises(RouterUnreachableError, match=r"router 127\.0\.0\.1:2"):
            await client.get_policy()
        with pytest.raises(RouterUnreachableError):
            await anext(client.watch_decisions())
        assert time.monotonic() - begun_s < 4.0


async def test_errors_carry_the_status_code(routers):
    _, address = await routers.start()
    async with RouterClient(address) as client:
        with pytest.raises(RouterError, match="INVALID_ARGUMENT: unknown policy 'nope'") as caught:
            await client.set_policy("nope")
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert not isinstance(caught.value, NoWorkerError | RouterUnreachableError)


async def test_a_stream_that_the_router_ends_just_ends(routers):
    server, address = await routers.start("d0")
    async with RouterClient(address) as client:
        stream = client.watch_fleet()
        await anext(stream)
        rest = asyncio.create_task(anext(stream, "ended"))
        await asyncio.sleep(0)
        await server.stop(grace_s=1.0)
        assert await rest == "ended"


async def test_the_fleet_and_the_policy_can_be_run_from_here(routers):
    _, address = await routers.start("d0")
    async with RouterClient(address) as client:
        assert await client.register(fake_info("d1", DECODE))
        assert not await client.register(fake_info("d1", DECODE))
        assert await client.drain("d0") == 0
        statuses = {status.info.worker_id: status for status in await client.workers()}
        assert statuses["d1"].health is WorkerHealth.STARTING
        assert (statuses["d0"].health, statuses["d0"].reason) == (WorkerHealth.DRAINING, "draining")
        assert statuses["d0"].info == fake_info("d0", DECODE)
        assert (await client.reserve_decode()).worker.worker_id == "d1"
        assert await client.remove("d0")
        assert not await client.remove("d0")
        status = await client.set_policy("union-cost", {"power": 8})
        assert status.options["power"] == 8.0
        now = await client.get_policy()
        assert now.policy == "union-cost"
        assert "jsq" in now.available
        assert not (await client.get_profile()).loaded


async def test_explaining_names_every_decoder_and_books_nothing(routers):
    _, address = await routers.start("d0", "d1")
    async with RouterClient(address) as client:
        await client.drain("d1")
        decision = await client.explain_decode(signature=fake_signature(), policy="union-cost")
        assert decision.policy == "union-cost"
        assert decision.worker_id == "d0"
        assert {c.worker_id: (c.eligible, c.reason) for c in decision.candidates}["d1"] == (
            False,
            "draining",
        )
        nobody = await client.explain_decode(exclude=["d0"])
        assert nobody.worker_id == ""
        assert [status.bookings for status in await client.workers()] == [0, 0]


@pytest.mark.parametrize("addresses", ["", [], ["h:1", ""]])
def test_no_address_is_refused(addresses):
    with pytest.raises(ValueError, match="addresses must name"):
        RouterClient(addresses)


def test_a_deadline_must_be_positive():
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        RouterClient("h:1", timeout_s=0)
