"""A prefill/decode fleet of real processes on this machine."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from eldr.cluster.errors import ConfigError
from eldr.cluster.ports import LOOPBACK, free_ports
from eldr.cluster.readiness import http_ready, port_ready
from eldr.cluster.supervisor import GRACE_S, Command, Supervisor
from eldr.cluster.vllm_server import EngineSettings, Leg, VllmServer

START_TIMEOUT_S = 300.0
"""Limit for one vLLM server: about 25 s on a free core, 130 s measured on busy ones."""
SERVICE_TIMEOUT_S = 60.0

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How many servers of which settings. Raises ConfigError where a field is out of range.

    `cores` are the CPUs to spread the servers over, one each; empty takes all that this process may use.
    `router_port` and `gateway_port` are loopback ports, 0 for any free one.
    `start_together` servers start at the same time. The extra words go to the servers of one leg,
    `connector_config` into the connector's extra config of all.
    """

    engine: EngineSettings
    prefill: int = 1
    decode: int = 4
    cores: tuple[int, ...] = ()
    start_together: int = 1
    start_timeout_s: float = START_TIMEOUT_S
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    router_port: int = 0
    gateway_port: int = 0

    def __post_init__(self) -> None:
        for name in ("router_port", "gateway_port"):
            if not 0 <= getattr(self, name) < 1 << 16:
                raise ConfigError(f"{name} must be 0 to 65535, got {getattr(self, name)}")
        for name in ("prefill", "decode", "start_together"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        usable = os.sched_getaffinity(0)
        for core in self.cores:
            if core not in usable:
                raise ConfigError(f"cores must be among {sorted(usable)}, got {core}")
        if not self.start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s must be positive, got {self.start_timeout_s}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The servers of a fleet with their ports and cores, and the router's and the gateway's address."""

    prefill: tuple[VllmServer, ...]
    decode: tuple[VllmServer, ...]
    router_address: str
    gateway_port: int

    @property
    def servers(self) -> tuple[VllmServer, ...]:
        """Prefill and decode servers."""
        return self.prefill + self.decode

    @property
    def gateway_url(self) -> str:
        """Where the gateway listens."""
        return f"http://{LOOPBACK}:{self.gateway_port}"


def plan_layout(config: FleetConfig, ports: Sequence[int], cores: Sequence[int]) -> Layout:
    """Gives every server its ports and a core. Pure.

    Decoders are dealt over the cores first, since they are compared with each other; prefill servers follow.
    `ports` needs three per server and two more.
    """
    left = iter(ports)
    router = f"{LOOPBACK}:{next(left)}"
    gateway = next(left)

    def server(leg: Leg, number: int, core: int, extra: tuple[str, ...]) -> VllmServer:
        return VllmServer(
            name=f"{leg}-{number}",
            leg=leg,
            settings=config.engine,
            http_port=next(left),
            grpc_port=next(left),
            nixl_port=next(left),
            core=core,
            routers=(router,),
            extra_args=extra,
            connector_config=config.connector_config,
        )

    decode = tuple(
        server(Leg.DECODE, number, cores[number % len(cores)], config.decode_args)
        for number in range(config.decode)
    )
    prefill = tuple(
        server(Leg.PREFILL, number, cores[(config.decode + number) % len(cores)], config.prefill_args)
        for number in range(config.prefill)
    )
    return Layout(prefill, decode, router, gateway)


class LocalFleet:
    """Runs a fleet in a work folder: servers, router and gateway, a log file each. A context manager.

    Servers register with the router by themselves, whether it starts before or after them.
    """

    def __init__(self, config: FleetConfig, log_dir: Path, report: Report = lambda _: None) -> None:
        self.config = config
        cores = config.cores or tuple(sorted(os.sched_getaffinity(0)))
        ports = free_ports(3 * (config.prefill + config.decode) + 2)
        ports[:2] = (config.router_port or ports[0], config.gateway_port or ports[1])
        self.layout = plan_layout(config, ports, cores)
        self.supervisor = Supervisor(log_dir, GRACE_S)
        self._report = report

    def __enter__(self) -> "LocalFleet":
        self.supervisor.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.supervisor.__exit__(kind, error, traceback)

    def start_servers(self) -> None:
        """Starts all prefill and decode servers, `start_together` at a time, and waits for each."""
        servers = self.layout.servers
        width = self.config.start_together
        for first in range(0, len(servers), width):
            self.start_group(servers[first : first + width])

    def start_group(self, servers: Sequence[VllmServer]) -> None:
        """Starts servers at the same time and waits until each answers /health."""
        for server in servers:
            self.supervisor.start(server.command())
        for server in servers:
            probe = http_ready(f"{server.http_url}/health")
            seconds = self.supervisor.wait_ready(server.name, probe, self.config.start_timeout_s)
            self._report(f"{server.name} ready after {seconds:.0f} s")

    def start_router(self, *words: str) -> str:
        """Starts `eldr router` with further words and returns its host:port."""
        address = self.layout.router_address
        self._start_verb("router", f"--listen={address}", *words)
        self.supervisor.wait_ready("router", port_ready(address), SERVICE_TIMEOUT_S)
        return address

    def start_gateway(self, *words: str) -> str:
        """Starts `eldr gateway` on the fleet's router and returns its URL."""
        listen = f"{LOOPBACK}:{self.layout.gateway_port}"
        self._start_verb("gateway", f"--listen={listen}", f"--router={self.layout.router_address}", *words)
        self.supervisor.wait_ready("gateway", port_ready(listen), SERVICE_TIMEOUT_S)
        return self.layout.gateway_url

    def stop(self, *servers: VllmServer) -> None:
        """Ends the given servers."""
        self.supervisor.stop(*(server.name for server in servers))

    def decode_cpu_seconds(self) -> float:
        """CPU time in seconds since their start of all decode servers' process trees."""
        return sum(self.supervisor.cpu_seconds(*(server.name for server in self.layout.decode)).values())

    def _start_verb(self, verb: str, *words: str) -> None:
        self.supervisor.start(Command(verb, (sys.executable, "-m", "eldr.cli.main", verb, *words)))
