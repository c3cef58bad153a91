"""One prefill and one decode engine over many requests: memory stays flat, and nothing of a request is left.

A slice of 1,000 requests runs with the other cluster tests; `tox run -e soak` sends 10,000.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from eldr.client import RouterClient, WorkerClient
from eldr.cluster.local import FleetConfig, LocalFleet
from eldr.cluster.procfs import read_processes, tree
from eldr.cluster.vllm_server import EngineSettings, VllmServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

MODEL = Path(__file__).resolve().parents[2] / "integration/testbed/model"
IN_FLIGHT = 32
WARM_UP = 600
"""Requests before the first reading: allocators, thread pools and bounded caches fill in these."""

GROWTH_BYTES_PER_REQUEST = 1024
"""Less than one signature of this model with its request: what is kept per request would show."""

SLACK_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    engine = EngineSettings(str(MODEL), max_model_len=256, max_num_seqs=IN_FLIGHT, kv_cache_mib=32)
    with LocalFleet(
        FleetConfig(engine, prefill=1, decode=1), tmp_path_factory.mktemp("logs"), print
    ) as running:
        running.start_router()
        running.start_servers()
        running.start_gateway()
        yield running


def memory_bytes(fleet: LocalFleet, server: VllmServer) -> int:
    """Proportional set size of the server's process tree."""
    root = fleet.supervisor.pid(server.name)
    total = 0
    for stat in tree(root, read_processes()):
        for line in Path(f"/proc/{stat.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


async def send(url: str, first: int, count: int) -> int:
    """Sends `count` different prompts of 40 tokens for 3 tokens each; returns how many answered 200."""
    numbers = iter(range(first, first + count))
    good = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal good
        for number in numbers:
            prompt = [3 + (number * 7919 + place * 104_729) % 7_900 for place in range(40)]
            body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 3, "ignore_eos": True}
            async with session.post(url + "/v1/completions", json=body) as response:
                await response.read()
                good += response.status == 200

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(work(session))
    return good


async def left_over(fleet: LocalFleet) -> dict[str, Any]:
    """Everything that is still kept for single requests, wherever it can be read."""
    prefill, decode = fleet.layout.prefill[0], fleet.layout.decode[0]
    async with (
        RouterClient(fleet.layout.router_address) as router,
        WorkerClient(prefill.grpc_address) as held,
        WorkerClient(decode.grpc_address) as decoder,
    ):
        status, state = await held.get_prefill_status(), await decoder.get_state()
        return {
            "bookings": sum(worker.bookings for worker in await router.workers()),
            "held transfers": status.held_transfers,
            "KV of prefill": status.kv_usage,
            "reservations": sorted(state.reservation_ids),
            "queue": state.running + state.waiting,
            "KV of decode": state.kv_usage,
        }


async def test_memory_is_flat_and_nothing_is_left(fleet: LocalFleet, soak_requests: int) -> None:
    url = fleet.layout.gateway_url
    assert await send(url, 0, WARM_UP) == WARM_UP
    servers = fleet.layout.servers
    before = {server.name: memory_bytes(fleet, server) for server in servers}
    assert await send(url, WARM_UP, soak_requests) == soak_requests
    allowed = SLACK_BYTES + GROWTH_BYTES_PER_REQUEST * soak_requests
    grown = {server.name: memory_bytes(fleet, server) - before[server.name] for server in servers}
    print("memory growth in bytes:", grown)
    assert all(growth < allowed for growth in grown.values()), grown
    for _ in range(100):
        left = await left_over(fleet)
        if not any(left.values()):
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"left after the last answer: {left}")
