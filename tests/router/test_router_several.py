"""Several routers over one fleet: soft state only, and each sees the others' load through the decoders."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import Counter

import pytest
from router_rig import served, until

from eldr.client import Outcome, RouterClient, RouterError
from eldr.cluster.ports import free_ports
from eldr.router.fleet import HealthLimits
from eldr.router.settings import RouterSettings
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.signatures import fake_signature

PERIOD_S = 0.1
JSQ = RouterSettings(
    policy="jsq",
    health=HealthLimits(stale_s=2.0, dead_s=5.0),
    report_period_s=PERIOD_S,
    probe_period_s=0.1,
)


class Engine(FakeDecodeWorker):
    """A decode worker that says which reservations it runs."""

    def run(self, *reservation_ids):
        held = self.state.reservation_ids | set(reservation_ids)
        self.report(running=len(held), reservation_ids=held)

    def end(self, *reservation_ids):
        held = self.state.reservation_ids - set(reservation_ids)
        self.report(running=len(held), reservation_ids=held)


async def test_a_second_router_sees_the_first_ones_load_within_a_report():
    """Asks 7 and 8: nothing is shared between routers but what the decoders say."""
    d0, d1 = Engine("d0"), Engine("d1")
    engines = {"d0": d0, "d1": d1}
    async with served(JSQ, d0, d1) as (first, one):
        addresses = (d0.address, d1.address)
        async with served(RouterSettings(**{**vars_of(JSQ), "workers": addresses})) as (second, two):
            for server in (first, second):
                await until(lambda s=server: [w.health for w in s.core.workers()] == ["live", "live"])
            for _ in range(10):
                booking = await one.reserve_decode(exclude=["d1"])
                engines[booking.worker.worker_id].run(booking.reservation_id)
            seen_s = await until(lambda: second.core.fleet.member("d0").state.running == 10)
            assert seen_s < 5 * PERIOD_S
            placed = Counter()
            for _ in range(10):
                booking = await two.reserve_decode(signature=fake_signature())
                placed[booking.worker.worker_id] += 1
                engines[booking.worker.worker_id].run(booking.reservation_id)
            assert placed == {"d1": 10}
            # And it does not take the first one's requests for its own.
            assert {w.info.worker_id: w.bookings for w in second.core.workers()} == {"d0": 0, "d1": 10}


def vars_of(settings):
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


class RouterProcess:
    """`eldr router` as a process on a port that it keeps over restarts."""

    def __init__(self, port, workers):
        self.address = f"127.0.0.1:{port}"
        self._words = [word for worker in workers for word in ("--worker", worker)]
        self._process = None

    async def start(self):
        """Returns when it listens; what it says later is read away."""
        words = (
            "router",
            "--listen",
            self.address,
            "--policy",
            "jsq",
            "--probe-period-s",
            "0.2",
            *self._words,
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eldr.cli.main", *words),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said = b""
        async for line in self._process.stdout:
            said += line
            if re.search(rb"router_started", line):
                self._reading = asyncio.create_task(self._process.stdout.read())
                return
        raise AssertionError(said.decode())

    async def kill(self):
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        await self._reading


async def request(router, engines):
    """One request as a gateway makes it, on fake engines."""
    prefill = await router.select_prefill(prompt_prefix=os.urandom(8))
    booking = await router.reserve_decode(
        signature=fake_signature(), prompt_tokens=8, prefill_reservation_id=prefill.reservation_id
    )
    engine = engines[booking.worker.worker_id]
    engine.run(booking.reservation_id)
    await asyncio.sleep(0.05)
    engine.end(booking.reservation_id)
    await router.release_decode(booking.reservation_id, Outcome.COMPLETED, 4)


@pytest.mark.timeout(120)
async def test_a_router_killed_under_load_loses_no_request_and_is_whole_two_seconds_after_its_start():
    """Case 3.17: real processes, one worker address that accepts and never answers among the live ones."""
    engines = {f"d{i}": Engine(f"d{i}") for i in range(4)}
    prefills = [FakePrefillWorker("p0"), FakePrefillWorker("p1")]
    async with contextlib.AsyncExitStack() as stack:
        for worker in (*engines.values(), *prefills):
            await stack.enter_async_context(worker)
        hung = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
        stack.callback(hung.close)
        dead = f"127.0.0.1:{hung.sockets[0].getsockname()[1]}"
        addresses = [dead, *(worker.address for worker in (*engines.values(), *prefills))]
        one, two = (RouterProcess(port, addresses) for port in free_ports(2))
        for process in (one, two):
            await process.start()
            stack.push_async_callback(process.kill)
        # Two gateways that prefer different routers.
        routers = [
            await stack.enter_async_context(RouterClient(order))
            for order in ([one.address, two.address], [two.address, one.address])
        ]
        for router in routers:
            await whole(router, 6)
        served_requests, failed, ended = Counter(), [], asyncio.Event()

        async def load(index):
            while not ended.is_set():
                try:
                    await request(routers[index % 2], engines)
                    served_requests[index % 2] += 1
                except RouterError as error:
                    failed.append(error)

        tasks = [asyncio.create_task(load(index)) for index in range(8)]
        await asyncio.sleep(0.5)
        await one.kill()
        before = sum(served_requests.values())
        await one.start()
        begun_s = time.monotonic()
        async with RouterClient(one.address) as direct:
            await whole(direct, 6)
            whole_s = time.monotonic() - begun_s
            await request(direct, engines)
        await until(lambda: sum(served_requests.values()) > before + 50, 30)
        ended.set()
        await asyncio.gather(*tasks)
        assert failed == []
        assert whole_s < 2.0
        for engine in engines.values():
            assert engine.state.running == 0


async def whole(router, count):
    """Returns when a router knows so many workers and all are well."""
    for _ in range(1000):
        with contextlib.suppress(RouterError):
            workers = await router.workers()
            if len(workers) == count and all(w.health == "live" for w in workers):
                return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not {count} live workers")
