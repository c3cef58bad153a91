import json

from served_router import eldr, served_router

from eldr.routing.contract import DecodeRequest
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import fake_info


def join(server, *worker_ids):
    for worker_id in worker_ids:
        role = WorkerRole.DECODE if worker_id[0] == "d" else WorkerRole.PREFILL
        server.core.register(fake_info(worker_id, role))


async def test_the_fleet_is_shown_drained_and_reduced():
    async with served_router() as (server, address):
        join(server, "d0", "p0")
        shown = await eldr("workers", "--router", address)
        assert shown.code == 0, shown.err
        assert "d0" in shown.out
        assert "http://p0.fake:8000" in shown.out

        server.core.reserve_decode(DecodeRequest("r", None))
        drained = await eldr("workers", "drain", "d0", "--no-wait", "--limit-s", "60", ELDR_ROUTER=address)
        assert drained.out == "d0 is draining, 1 bookings left\n", drained.err
        listed = json.loads((await eldr("workers", "--router", address, "--json")).out)
        assert [w["info"]["worker_id"] for w in listed] == ["d0", "p0"]
        assert (listed[0]["health"], listed[0]["reason"]) == ("draining", "draining")

        removed = await eldr("workers", "--router", address, "remove", "d0")
        assert removed.out == "d0 is removed\n", removed.err
        again = await eldr("workers", "remove", "d0", "--router", address)
        assert again.code == 1
        assert "no worker 'd0' is registered" in again.err

        gone = await eldr("workers", "drain", "p0", "--limit-s", "0", "--router", address)
        assert gone.out == "p0 is draining, 0 bookings left\np0 is gone\n", gone.err
        assert server.core.workers() == []


async def test_no_router_is_said_with_what_to_do():
    ended = await eldr("workers", "--router", "127.0.0.1:1")
    assert ended.code == 1
    assert "no router answers at 127.0.0.1:1: start `eldr router`" in ended.err
