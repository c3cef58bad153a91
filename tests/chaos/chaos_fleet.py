"""A real cluster whose processes can be killed, stopped and cut off, and mended again."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from chaos_links import Link, Links
from chaos_load import MODEL

from eldr.cluster import (
    Command,
    EngineSettings,
    Leg,
    Supervisor,
    VllmServer,
    free_ports,
    http_ready,
    port_ready,
)
from eldr.cluster.ports import LOOPBACK
from eldr.cluster.procfs import read_processes, tree

TESTBED = Path(__file__).resolve().parents[2] / "integration/testbed"
LEASE_S = 6
START_TIMEOUT_S = 300.0

ROUTER_LIMITS = ("--stale-s=2", "--reservation-ttl-s=5", "--prefill-ttl-s=12")
GATEWAY_LIMITS = (
    "--connect-timeout=2",
    "--prefill-timeout=8",
    "--first-token-timeout=8",
    "--idle-timeout=8",
    "--decode-timeout=20",
    "--breaker-open=1",
    "--probe-after=2",
)
PATIENT_LIMITS = ("--probe-after=60",)


class Fault(StrEnum):
    """What happens to a process."""

    KILL = "kill"
    STOP = "stop"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class LinkedServer(VllmServer):
    """A vLLM server that says it is reached at `linked_port`."""

    linked_port: int = 0

    def kv_transfer_config(self) -> dict[str, Any]:
        config = VllmServer.kv_transfer_config(self)
        config["kv_connector_extra_config"]["eldr"]["http_url"] = f"http://{LOOPBACK}:{self.linked_port}"
        return config


class ChaosFleet:
    """Router, gateway, prefill and decode servers, a link in front of each. A context manager.

    `links` holds them by process name: the gateway's is what clients use, the router's what gateway and workers
    use, a server's is its HTTP port as the gateway sees it.
    """

    def __init__(self, prefill: int, decode: int, log_dir: Path) -> None:
        self.supervisor = Supervisor(log_dir)
        self.proxies = Links()
        self.links: dict[str, Link] = {}
        self._commands: dict[str, Command] = {}
        self._ready: dict[str, Any] = {}
        self._router, self._gateway, self._router_link, self._gateway_link, *ports = free_ports(
            4 + 4 * (prefill + decode)
        )
        engine = EngineSettings(
            model=str(TESTBED / "model"),
            served_name=MODEL,
            max_model_len=768,
            max_num_seqs=16,
            kv_cache_mib=16,
            state_period_s=0.25,
        )
        left = iter(ports)
        cores = sorted(os.sched_getaffinity(0))

        def server(leg: Leg, number: int, core: int) -> LinkedServer:
            return LinkedServer(
                name=f"{leg}-{number}",
                leg=leg,
                settings=engine,
                http_port=next(left),
                grpc_port=next(left),
                nixl_port=next(left),
                core=cores[core % len(cores)],
                routers=(f"{LOOPBACK}:{self._router_link}",),
                connector_config={"kv_lease_duration": LEASE_S},
                linked_port=next(left),
            )

        self.decode = [server(Leg.DECODE, number, number) for number in range(decode)]
        self.prefill = [server(Leg.PREFILL, number, decode + number) for number in range(prefill)]

    def __enter__(self) -> "ChaosFleet":
        self.proxies.__enter__()
        self.supervisor.__enter__()
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._commands:
            self._signal(name, signal.SIGCONT)
        self.supervisor.__exit__(None, None, None)
        self.proxies.__exit__()

    @property
    def router_address(self) -> str:
        """The router itself, not its link."""
        return f"{LOOPBACK}:{self._router}"

    @property
    def url(self) -> str:
        """Where clients send."""
        return f"http://{LOOPBACK}:{self._gateway_link}"

    @property
    def servers(self) -> Sequence[LinkedServer]:
        return (*self.prefill, *self.decode)

    def start_gateway(self, name: str, port: int, limits: Sequence[str]) -> None:
        """A gateway on the fleet's router, with its own time limits."""
        router = f"--router={LOOPBACK}:{self._router_link}"
        self._start_verb(name, port, "gateway", router, *limits)

    def strike(self, name: str, fault: Fault) -> None:
        """Kills or stops the whole process group of a server, or cuts its link."""
        if fault is Fault.CUT:
            self.proxies.hold(self.links[name], requests=True, answers=True)
        else:
            self._signal(name, signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)

    def mend(self, name: str, fault: Fault) -> None:
        """Undoes a fault; a killed server is started anew and ready when this returns."""
        if fault is Fault.CUT:
            self.proxies.heal(self.links[name])
        elif fault is Fault.STOP:
            self._signal(name, signal.SIGCONT)
        else:
            root = self.supervisor.pid(name)
            left = tree(root, read_processes())
            assert not left, f"{name} was killed, but {left} live on"
            self.supervisor.stop(name)
            self._start(name)

    def _start_all(self) -> None:
        for name, port, target in (
            ("router", self._router_link, self._router),
            ("gateway", self._gateway_link, self._gateway),
            *((server.name, server.linked_port, server.http_port) for server in self.servers),
        ):
            self.links[name] = self.proxies.add(port, target)
        self._start_verb("router", self._router, "router", *ROUTER_LIMITS)
        for first in range(0, len(self.servers), 2):
            pair = self.servers[first : first + 2]
            for server in pair:
                self._commands[server.name] = server.command()
                self._ready[server.name] = http_ready(f"{server.http_url}/health")
                self.supervisor.start(self._commands[server.name])
            for server in pair:
                self.supervisor.wait_ready(server.name, self._ready[server.name], START_TIMEOUT_S)
        self.start_gateway("gateway", self._gateway, GATEWAY_LIMITS)

    def _start_verb(self, name: str, port: int, *words: str) -> None:
        verb, *rest = words
        listen = f"{LOOPBACK}:{port}"
        argv = (sys.executable, "-m", "eldr.cli.main", verb, f"--listen={listen}", *rest)
        self._commands[name] = Command(name, argv)
        self._ready[name] = port_ready(listen)
        self._start(name)

    def _start(self, name: str) -> None:
        self.supervisor.start(self._commands[name])
        self.supervisor.wait_ready(name, self._ready[name], START_TIMEOUT_S)

    def _signal(self, name: str, number: signal.Signals) -> None:
        try:
            os.killpg(self.supervisor.pid(name), number)
        except (KeyError, ProcessLookupError):
            return  # not started, or gone
