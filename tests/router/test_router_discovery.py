import asyncio
import dataclasses
import socket

import pytest
from router_rig import served, until

from eldr.client import RouterClient
from eldr.router.counters import Counters
from eldr.router.discovery import DnsDiscovery, DnsName, resolve
from eldr.router.fleet import HealthLimits
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker

QUICK = RouterSettings(
    health=HealthLimits(stale_s=0.4, dead_s=1.0),
    report_period_s=0.05,
    probe_period_s=0.05,
    discover=("dns:///workers.fleet:9000",),
    discover_period_s=0.05,
)


class FakeDns:
    """Records by name; an OSError is raised."""

    def __init__(self, *addresses):
        self.answer = set(addresses)
        self.asked = []

    async def __call__(self, name, port):
        self.asked.append((name, port))
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


class Searches(list):
    def __init__(self, dns):
        self.counters = Counters()
        self.discovery = DnsDiscovery(
            DnsName("workers", 9000), self.append, self.remove, self.counters, 1.0, dns
        )


async def test_addresses_are_searched_once_and_given_up_when_their_record_goes():
    dns = FakeDns("10.0.0.1:9000", "10.0.0.2:9000")
    searches = Searches(dns)
    await searches.discovery.look_up()
    assert searches == ["10.0.0.1:9000", "10.0.0.2:9000"]
    dns.answer = {"10.0.0.2:9000", "[fd00::1]:9000"}
    await searches.discovery.look_up()
    assert set(searches) == {"10.0.0.2:9000", "[fd00::1]:9000"}
    assert dns.asked == [("workers", 9000)] * 2


@pytest.mark.parametrize("error", [socket.gaierror("Name or service not known"), TimeoutError()])
async def test_a_look_up_that_fails_changes_nothing_and_is_counted(error):
    dns = FakeDns("10.0.0.1:9000")
    searches = Searches(dns)
    await searches.discovery.look_up()
    dns.answer = error
    await searches.discovery.look_up()
    assert searches == ["10.0.0.1:9000"]
    assert searches.counters.value("eldr_discovery_errors_total", host="workers") == 1


async def test_the_systems_resolver_gives_addresses_of_both_families():
    found = await resolve("localhost", 9000)
    assert found & {"127.0.0.1:9000", "[::1]:9000"}
    with pytest.raises(OSError):
        await resolve("no-such-name.invalid", 9000)


@pytest.mark.parametrize(
    "text", ["workers:9000", "dns:///workers", "dns:///:9000", "dns:///a/b:1", "dns:///w:0", "dns:///[::1]:9"]
)
def test_a_name_that_cannot_be_looked_up_is_refused(text):
    with pytest.raises(ValueError, match="discover must be dns:///NAME:PORT, got"):
        RouterSettings(discover=(text,))


async def test_workers_come_by_dns_and_a_vanished_record_is_not_a_death():
    """A pod that is not ready any more has no record, and still serves what it has."""
    async with FakeDecodeWorker("d0") as d0, FakePrefillWorker("p0") as p0, FakeDecodeWorker("d1") as d1:
        dns = FakeDns(d0.address, p0.address)
        server = RouterServer(QUICK, resolver=dns)
        port = await server.start("127.0.0.1:0")

        def health():
            return {status.info.worker_id: status.health for status in server.core.workers()}

        try:
            await until(lambda: health() == {"d0": "live", "p0": "live"})
            dns.answer = {d1.address, p0.address}
            await until(lambda: health() == {"d0": "live", "p0": "live", "d1": "live"})
            lookups = len(dns.asked)
            await until(lambda: len(dns.asked) > lookups + 3)
            assert health()["d0"] == "live"
            # Without a record a dead worker is not looked for, so that it can be forgotten.
            await d0.stop()
            await until(lambda: health()["d0"] == "dead")
            async with RouterClient(f"127.0.0.1:{port}") as client:
                assert (await client.reserve_decode()).worker.worker_id == "d1"
        finally:
            await server.stop(grace_s=0.1)


async def test_a_worker_that_is_well_is_not_asked_again_by_its_search():
    async with FakeDecodeWorker("d0") as worker:
        settings = dataclasses.replace(QUICK, discover=(), workers=(worker.address,))
        async with served(settings) as (server, _):
            await until(lambda: [status.health for status in server.core.workers()] == ["live"])
            calls = worker.calls["GetInfo"]
            await asyncio.sleep(0.3)
            assert worker.calls["GetInfo"] == calls
