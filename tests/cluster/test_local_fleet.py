"""The layout of a fleet: ports, cores, names."""

import pytest

from eldr.cluster import ConfigError, EngineSettings, FleetConfig, plan_layout

ENGINE = EngineSettings("m")


def layout(prefill=1, decode=4, cores=(0, 1)):
    config = FleetConfig(ENGINE, prefill, decode)
    return plan_layout(config, range(10_000, 10_000 + 3 * (prefill + decode) + 2), cores)


def test_every_server_has_ports_of_its_own():
    plan = layout(2, 3)
    ports = [port for s in plan.servers for port in (s.http_port, s.grpc_port, s.nixl_port)]
    ports += [int(plan.router_address.rpartition(":")[2]), plan.gateway_port]
    assert len(set(ports)) == len(ports) == 17


def test_decoders_are_spread_evenly_over_the_cores_and_prefill_follows():
    plan = layout(decode=4, cores=(4, 7))
    assert [server.core for server in plan.decode] == [4, 7, 4, 7]
    assert [server.core for server in plan.prefill] == [4]
    assert [server.core for server in layout(decode=3, cores=(0, 1, 2, 3)).prefill] == [3]


def test_servers_know_the_router_and_have_stable_names():
    plan = layout(1, 2)
    assert [server.name for server in plan.servers] == ["prefill-0", "decode-0", "decode-1"]
    assert {server.routers for server in plan.servers} == {(plan.router_address,)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill", 0), ("decode", 0), ("start_together", 0), ("start_timeout_s", 0.0), ("cores", (4096,))],
)
def test_a_fleet_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        FleetConfig(ENGINE, **{field: value})
