"""Reads what the demo needs from running engines: totals of decoders, signatures, prefix-cache hits, version."""

import asyncio
from collections.abc import Sequence

import aiohttp

from eldr.client import WorkerClient
from eldr.demo.compare import CountArray
from eldr.demo.measure import Meter

SETTLE_S = 5.0
"""How long the last signatures of a round may take to arrive."""
QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"


class SignatureLog:
    """Collects the signatures of prefill workers as they complete. Entered on the loop that it runs on."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._clients = [WorkerClient(address) for address in addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self._arrived = asyncio.Event()
        self.counts: list[CountArray] = []
        self.dropped = 0

    async def __aenter__(self) -> "SignatureLog":
        self._tasks = [asyncio.create_task(self._follow(client)) for client in self._clients]
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def _follow(self, client: WorkerClient) -> None:
        async for event in client.watch_signatures():
            self.counts.append(event.signature.counts)
            self.dropped = max(self.dropped, event.dropped)
            self._arrived.set()

    async def settle(self, count: int) -> list[CountArray]:
        """Waits until `count` signatures are there, at most SETTLE_S; takes out what there is.

        Raises what ended the watching of a worker.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                while len(self.counts) < count:
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass  # fewer came: the caller sees how many
        taken, self.counts = self.counts, []
        return taken


async def read_totals(clients: Sequence[WorkerClient], cpu_s: float) -> Meter:
    """Sums the decoders' totals, read from their engines now."""
    states = await asyncio.gather(*(client.get_state() for client in clients))
    return Meter(
        sum(state.totals.decode_tokens for state in states),
        sum(state.totals.union_tokens for state in states),
        cpu_s,
    )


async def prefix_cache(urls: Sequence[str]) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix caches of these servers since their start, and those found."""
    queries = hits = 0.0
    async with aiohttp.ClientSession() as session:
        for url in urls:
            async with session.get(url + "/metrics") as response:
                response.raise_for_status()
                text = await response.text()
            queries += metric(text, QUERIES)
            hits += metric(text, HITS)
    return queries, hits


def metric(text: str, name: str) -> float:
    """Sum of a metric over its label sets in Prometheus text, 0 where it is not there."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith((name + "{", name + " "))
    )


async def vllm_version(url: str) -> str:
    """Version that the server reports."""
    async with aiohttp.ClientSession() as session, session.get(url + "/version") as response:
        response.raise_for_status()
        return str((await response.json())["version"])
