"""The running cluster of a module, and what its tests read from it."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eldr.client import RouterClient, WorkerClient
from eldr.cluster import Command
from eldr.cluster.local import LocalFleet
from eldr.cluster.ports import LOOPBACK, free_ports
from eldr.cluster.readiness import port_ready

MODEL = "m"


@dataclass(frozen=True)
class Served:
    """A running cluster. `ordinary_url` is one vLLM server with the same model and no connector."""

    fleet: LocalFleet
    gateway_url: str
    router: str
    ordinary_url: str

    @property
    def prefill_grpc(self) -> str:
        return self.fleet.layout.prefill[0].grpc_address

    @property
    def decode_urls(self) -> list[str]:
        return [server.http_url for server in self.fleet.layout.decode]


def metric(text: str, name: str, **labels: str) -> float:
    """Sum of a Prometheus counter over the label sets that hold `labels`."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


async def assert_nothing_is_held(served: Served, within_s: float = 5.0) -> None:
    """No booking at the router, no held transfer and no used KV block at the prefill worker."""
    async with RouterClient(served.router) as router, WorkerClient(served.prefill_grpc) as prefill:
        deadline = time.monotonic() + within_s
        while True:
            workers = await router.workers()
            status = await prefill.get_prefill_status()
            held = {worker.info.worker_id: worker.bookings for worker in workers if worker.bookings}
            if not held and not status.held_transfers and status.kv_usage == 0.0:
                return
            assert time.monotonic() < deadline, (
                f"bookings {held}, held transfers {status.held_transfers}, KV use {status.kv_usage:.3f}"
            )
            await asyncio.sleep(0.05)


@contextmanager
def extra_gateway(served: Served, name: str, *words: str) -> Iterator[str]:
    """The URL of another gateway on the same fleet, started with these words."""
    listen = f"{LOOPBACK}:{free_ports(1)[0]}"
    command = (
        sys.executable,
        "-m",
        "eldr.cli.main",
        "gateway",
        f"--listen={listen}",
        f"--router={served.router}",
    )
    supervisor = served.fleet.supervisor
    supervisor.start(Command(name, (*command, *words)))
    try:
        supervisor.wait_ready(name, port_ready(listen), 60)
        yield f"http://{listen}"
    finally:
        supervisor.stop(name)
