"""The gateway under load: what it adds, many streams at once, many requests one after the other.

Router and gateway are processes; the fake workers and the clients share this one. Workers answer at once, so that
every millisecond is somebody's overhead.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from eldr.client import Outcome, RouterClient, WorkerRole
from eldr.gateway.file_limit import raise_file_limit
from eldr.gateway.legs import ClientRequest, Endpoint, decode_body, prefill_body, read_prefill_reply
from eldr.rpc.codec import signature_to_text
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.fake_engine import FakeEngine, FakeTransfers
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.faults import Fault, FaultKind, Pause

PATH = "/v1/completions"
STREAMS = 2000
STREAMS_PER_S = 200.0
"""New streams a second; the fake workers and the clients are one process, which a burst would only saturate."""

SOAK_REQUESTS = 10_000
SOAK_CLIENTS = 32
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HeldTransfers(set[str]):
    """What a prefill worker's gRPC service holds is what its engine holds."""

    def __init__(self, transfers: FakeTransfers) -> None:
        super().__init__()
        self._transfers = transfers

    def __contains__(self, transfer_id: object) -> bool:
        return self._transfers.find(str(transfer_id)) is not None

    def discard(self, transfer_id: str) -> None:
        self._transfers.end(transfer_id, "released")


@dataclass
class Fleet:
    """Fake workers of this process behind a router and a gateway in processes of their own."""

    engines: dict[WorkerRole, list[FakeEngine]]
    transfers: FakeTransfers
    router: RouterClient
    gateway_url: str
    gateway_pid: int
    http: aiohttp.ClientSession

    async def stream(self, seed: int) -> str:
        """One streamed completion through the gateway: "done", or what it ended with."""
        async with self.http.post(self.gateway_url + PATH, json=body_of(seed)) as response:
            text = await response.text()
        return "done" if text.endswith("data: [DONE]\n\n") else f"HTTP {response.status}: {text[-200:]}"

    async def bookings(self) -> int:
        return sum(worker.bookings for worker in await self.router.workers())


def body_of(seed: int) -> dict[str, Any]:
    return {"model": "fake", "prompt": f"prompt number {seed}", "max_tokens": 4, "seed": seed, "stream": True}


def signature_text(layers: int = 48, experts: int = 128, top_k: int = 8, tokens: int = 200) -> str:
    """The signature of one prompt in a size as large models have it."""
    rng = np.random.default_rng(0)
    counts = rng.multinomial(tokens * top_k, rng.dirichlet(np.ones(experts), layers)).astype(np.uint32)
    return signature_to_text(ExpertSignature("fake-model", top_k, tokens, tokens, counts))


async def started(stack: contextlib.AsyncExitStack, marker: str, *words: str) -> tuple[int, str]:
    """Starts a verb of eldr; its process id and the address in the log line of `marker`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "eldr.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    said = ""
    async for line in process.stdout:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line.decode())
        said += plain
        if marker in plain:
            reading = asyncio.create_task(drop(process.stdout))
            stack.callback(reading.cancel)
            return process.pid, plain
    raise SystemExit(f"eldr {words[0]} did not start:\n{said}")


async def drop(stream: asyncio.StreamReader) -> None:
    async for _ in stream:
        pass


@contextlib.asynccontextmanager
async def fleet_of(prefills: int, decodes: int, *gateway_words: str) -> AsyncIterator[Fleet]:
    """A started fleet whose workers are all live."""
    async with contextlib.AsyncExitStack() as stack:
        transfers, text = FakeTransfers(), signature_text()
        engines: dict[WorkerRole, list[FakeEngine]] = {WorkerRole.PREFILL: [], WorkerRole.DECODE: []}
        words: list[str] = []
        for role, count in ((WorkerRole.PREFILL, prefills), (WorkerRole.DECODE, decodes)):
            for index in range(count):
                engine = await stack.enter_async_context(FakeEngine(f"{role}{index}", transfers))
                engine.signature = lambda _: text
                engines[role].append(engine)
                kind = FakePrefillWorker if role is WorkerRole.PREFILL else FakeDecodeWorker
                service = await stack.enter_async_context(kind(engine.worker_id, http_url=engine.url))
                if isinstance(service, FakePrefillWorker):
                    service.held = HeldTransfers(transfers)
                words += ["--worker", service.address]
        _, said = await started(
            stack, "router_started", "router", "--listen", "127.0.0.1:0", "--policy", "jsq", *words
        )
        address = f"127.0.0.1:{re.search(r'port=([0-9]+)', said)[1]}"  # type: ignore[index]
        router = await stack.enter_async_context(RouterClient(address))
        pid, said = await started(
            stack,
            "gateway_started",
            *("gateway", "--listen", "127.0.0.1:0", "--router", address, *gateway_words),
        )
        listen = re.search(r"listen=(\S+)", said)[1]  # type: ignore[index]
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
            )
        )
        async for snapshot in router.watch_fleet():
            if len(snapshot.workers) == prefills + decodes and not any(w.reason for w in snapshot.workers):
                break
        yield Fleet(engines, transfers, router, f"http://{listen}", pid, http)


async def both_legs(fleet: Fleet, seed: int) -> None:
    """What a client does that needs no gateway: the router's calls and the two legs."""
    request = ClientRequest(Endpoint.COMPLETIONS, body_of(seed), "")
    prefill = await fleet.router.select_prefill(model="fake", prompt_prefix=body_of(seed)["prompt"].encode())
    headers = {"X-Request-Id": uuid.uuid4().hex}
    url = prefill.worker.http_url + PATH
    async with fleet.http.post(url, json=prefill_body(request), headers=headers) as response:
        reply = read_prefill_reply(await response.read())
    decode = await fleet.router.reserve_decode(
        model="fake",
        signature=reply.signature,
        prompt_tokens=reply.prompt_tokens,
        max_tokens=4,
        prefill_reservation_id=prefill.reservation_id,
    )
    headers = {"X-Request-Id": uuid.uuid4().hex}
    body = decode_body(request, reply, decode.reservation_id)
    async with fleet.http.post(decode.worker.http_url + PATH, json=body, headers=headers) as response:
        text = await response.text()
    if not text.endswith("data: [DONE]\n\n"):
        raise SystemExit(f"a direct request ended with HTTP {response.status}: {text[:200]}")
    await fleet.router.release_decode(decode.reservation_id, Outcome.COMPLETED, 4)


def added_ms(direct_s: list[float], gateway_s: list[float]) -> dict[str, float]:
    """Difference of the medians and of the 99th percentiles, in milliseconds."""
    direct, through = (np.percentile(np.array(seconds) * 1e3, [50, 99]) for seconds in (direct_s, gateway_s))
    return {"p50": round(float(through[0] - direct[0]), 3), "p99": round(float(through[1] - direct[1]), 3)}


async def measure_added(quick: bool) -> dict[str, Any]:
    """`gateway_added_ms`: one request at a time, direct and through the gateway in turn."""
    rounds = 100 if quick else 1000
    took: dict[str, list[float]] = {"direct": [], "gateway": []}
    async with fleet_of(1, 4) as fleet:
        for seed in range(rounds + 20):
            for name in took if seed % 2 else reversed(took):
                begun_s = time.perf_counter()
                if name == "direct":
                    await both_legs(fleet, seed)
                elif (ended := await fleet.stream(seed)) != "done":
                    raise SystemExit(f"a request through the gateway ended with {ended}")
                if seed >= 20:
                    took[name].append(time.perf_counter() - begun_s)
    for name, seconds in took.items():
        p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
        print(f"{name:8} p50 {p50:8.3f} ms  p99 {p99:8.3f} ms", flush=True)
    added = added_ms(took["direct"], took["gateway"])
    print(f"added    p50 {added['p50']:8.3f} ms  p99 {added['p99']:8.3f} ms", flush=True)
    return {"gateway_added_ms": added}


async def measure_streams(quick: bool) -> dict[str, Any]:
    """`streams`: all begun before the first ends."""
    count = 200 if quick else STREAMS
    files = raise_file_limit()
    if 0 <= files < 4 * count:
        raise SystemExit(f"{count} streams need {4 * count} open files, the limit is {files} (ulimit -n)")
    async with fleet_of(2, 8) as fleet:
        pause = Pause()
        for engine in fleet.engines[WorkerRole.DECODE]:
            engine.pauses["token"] = pause
        begun_s = time.monotonic()
        clients = []
        for seed in range(count):
            clients.append(asyncio.create_task(fleet.stream(seed)))
            await asyncio.sleep(1.0 / STREAMS_PER_S)
        # One that has ended already has failed; it must not keep the others waiting.
        while pause.reached + sum(client.done() for client in clients) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        all_begun_s = time.monotonic() - begun_s
        probed_s = time.monotonic()
        async with fleet.http.get(fleet.gateway_url + "/health") as response:
            await response.read()
        health_ms = (time.monotonic() - probed_s) * 1e3
        pause.go_on()
        ended = Counter(await asyncio.gather(*clients))
        left = await _settled(fleet)
    print(
        f"streams {count}: all begun after {all_begun_s:.1f} s, health check in {health_ms:.0f} ms, "
        f"{dict(ended)}, {left} bookings left",
        flush=True,
    )
    return {
        "streams": {
            "count": count,
            "done": ended["done"],
            "all_begun_s": round(all_begun_s, 2),
            "health_ms": round(health_ms, 1),
            "bookings_left": left,
        }
    }


async def measure_soak(quick: bool) -> dict[str, Any]:
    """`soak`: most requests go well, some clients leave, some workers fail; growth after the first tenth."""
    count = 500 if quick else SOAK_REQUESTS
    # A made reset is an exception in the fake worker's server, which would log each.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    async with fleet_of(2, 4) as fleet:
        ended: Counter[str] = Counter()
        await _soak(fleet, range(count // 10), ended)
        await _settled(fleet)
        before = _rss_bytes(fleet.gateway_pid), _open_files(fleet.gateway_pid)
        await _soak(fleet, range(count // 10, count), ended)
        left = await _settled(fleet)
        held = len(fleet.transfers.held)
        await asyncio.sleep(5.0)
        after = _rss_bytes(fleet.gateway_pid), _open_files(fleet.gateway_pid)
    soak = {
        "requests": count,
        "rss_growth_bytes": after[0] - before[0],
        "fds_growth": after[1] - before[1],
        "bookings_left": left,
        "transfers_left": held,
        "stale_pulls": fleet.transfers.stale_pulls,
        "ended": dict(ended),
    }
    print(f"soak {json.dumps(soak)}", flush=True)
    return {"soak": soak}


async def _soak(fleet: Fleet, seeds: range, ended: Counter[str]) -> None:
    left = iter(seeds)
    decoders = fleet.engines[WorkerRole.DECODE]

    async def client() -> None:
        for seed in left:
            if seed % 25 == 7:
                decoders[seed % len(decoders)].faults.append(Fault(FaultKind.STATUS, status=503))
            if seed % 50 == 9:
                decoders[seed % len(decoders)].faults.append(Fault(FaultKind.RESET))
            if seed % 20 == 3:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.002 * (seed % 7)):
                        await fleet.stream(seed)
                ended["left"] += 1
            else:
                ended[await fleet.stream(seed)] += 1

    await asyncio.gather(*(client() for _ in range(SOAK_CLIENTS)))


async def _settled(fleet: Fleet, limit_s: float = 20.0) -> int:
    """Bookings that are left once they have had the time to be released."""
    end_s = time.monotonic() + limit_s
    while (left := await fleet.bookings()) and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return left


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
