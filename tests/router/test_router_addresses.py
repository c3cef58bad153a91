"""A worker names where the router dials and where prompts go: only to addresses of the allow-list."""

import grpc
import pytest
from router_rig import served

from eldr.client import RouterError, WorkerRole
from eldr.router.addresses import AllowedAddresses
from eldr.router.errors import AddressNotAllowedError
from eldr.router.registrations import MAX_HOSTS, RegistrationRate
from eldr.router.settings import RouterSettings
from eldr.testing.clock import FakeClock
from eldr.testing.fake_services import FakeDecodeWorker, fake_info


def worker(http: str, grpc_host: str | None = None):
    return fake_info(
        "d0", WorkerRole.DECODE, http_url=f"http://{http}:1", grpc_address=f"{grpc_host or http}:2"
    )


@pytest.mark.parametrize(
    ("patterns", "host", "passes"),
    [
        ((), "evil.example", True),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.7",), "10.0.0.7", True),
        (("fd00::/8",), "[fd00::1]", True),
        (("fd00::/8",), "[fe80::1]", False),
        (("10.0.0.0/8",), "[::ffff:10.0.0.1]", True),
        (("*.fleet.internal",), "gpu-7.fleet.internal", True),
        (("*.fleet.internal",), "GPU-7.Fleet.Internal", True),
        (("*.fleet.internal",), "fleet.internal.evil.example", False),
        (("gpu-?", "10.0.0.0/8"), "gpu-7", True),
        # A network matches no name, whatever the name looks like, and a glob no IP address.
        (("10.0.0.0/8",), "10.evil.example", False),
        (("*",), "169.254.169.254", False),
        (("*",), "anything", True),
    ],
)
def test_a_host_passes_where_a_pattern_of_its_kind_matches(patterns, host, passes):
    allowed = AllowedAddresses(patterns)
    if passes:
        allowed.require(worker(host))
        return
    with pytest.raises(AddressNotAllowedError, match="http_url is not in the router's allow-list"):
        allowed.require(worker(host))


def test_both_addresses_are_checked():
    with pytest.raises(AddressNotAllowedError, match=r"'evil\.example' of its grpc_address"):
        AllowedAddresses(("*.internal",)).require(worker("a.internal", "evil.example"))


@pytest.mark.parametrize(
    "pattern", ["10.0.0.0/99", "10.0.0.1/8", "10.0.0", "", "a b", "http://x", "300.1.1.1"]
)
def test_a_malformed_pattern_is_refused_by_value(pattern):
    with pytest.raises(ValueError, match="allow_workers must be networks"):
        RouterSettings(allow_workers=(pattern,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("http_url", "http://good.internal@evil.example:1"),
        ("http_url", "http://good.internal\\@evil.example"),
        ("http_url", "http://evil.example#good.internal"),
        ("http_url", "http://host:99999"),
        ("http_url", "http://host:1/a?b=c"),
        ("http_url", "http://host:1\r\nX: y"),
        ("http_url", "ftp://host:1"),
        ("grpc_address", "unix:/run/docker.sock"),
        ("grpc_address", "dns://evil.example/good.internal:1"),
        ("grpc_address", "ipv4:10.0.0.1:1,11.0.0.1:1"),
        ("grpc_address", "host"),
        ("grpc_address", "host:0"),
        ("incarnation", "a\nb"),
        ("served_model", "x" * 1025),
    ],
)
def test_an_address_of_which_two_readers_might_disagree_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        fake_info("d0", WorkerRole.DECODE, **{field: value})


async def test_the_router_refuses_a_worker_outside_its_list_by_either_way_in():
    """Registered by itself it is told; found by the router it is not taken in."""
    async with (
        FakeDecodeWorker("d0", http_url="http://evil.example:1") as listed,
        served(RouterSettings(workers=(listed.address,), allow_workers=("127.0.0.0/8",))) as (server, client),
    ):
        with pytest.raises(RouterError, match=r"'evil\.example' of its http_url") as caught:
            await client.register(listed.info)
        assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
        assert server.core.workers() == []


def test_the_rate_bounds_each_host_by_itself_and_comes_back_with_time():
    clock = FakeClock()
    rate = RegistrationRate(10, clock)
    assert [rate.allows(f"ipv4:10.0.0.1:{port}") for port in range(21)] == [True] * 20 + [False]
    assert rate.allows("ipv4:10.0.0.2:1")
    clock.advance(0.1)
    assert rate.allows("ipv4:10.0.0.1:99")
    assert not rate.allows("ipv4:10.0.0.1:99")


def test_hosts_that_are_remembered_are_bounded():
    rate = RegistrationRate(10, FakeClock())
    for host in range(MAX_HOSTS + 100):
        rate.allows(f"ipv6:[::{host:x}]:1")
    assert len(rate._buckets) == MAX_HOSTS


async def test_a_flood_of_registrations_is_refused_and_the_router_goes_on():
    async with served(RouterSettings(registrations_per_s=1)) as (_server, client):
        info = fake_info("d0", WorkerRole.DECODE)
        assert await client.register(info)
        assert not await client.register(info)
        with pytest.raises(RouterError, match="more than 1 registrations a second") as caught:
            await client.register(info)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [status.info for status in await client.workers()] == [info]
