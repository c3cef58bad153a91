"""A router under load, with fakes for all that is around it.

    python -m integration.bench router_load [--quick] [--json FILE] [--only PART ...]

`reserve`: `eldr router` as a process on one core; `ReserveDecode` at a fixed rate, each booking released a while
later, while every fake decoder streams reports (48 layers x 128 experts) at the default period, which name the
bookings that they carry. The time of a call is the caller's, from its start to its answer. The caller and the decoders
share the other cores. `late_p99` is how late calls began, `router_cpu` the router's share of its core: figures of a run
with late calls say more about the machine than about the router. Milliseconds, median and 99th percentile, for 16 and
for 512 decoders.

`added`: what `eldr gateway` adds to a client that asks the router and does both legs itself, on the same fake workers,
one request at a time. `streams`: 2,000 streams, all begun before the first ends. `soak`: 10,000 requests, some of whose
clients leave and some of whose workers fail; growth of the gateway's memory and open files after the first tenth.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from eldr.rpc.codec import encode_signature
from eldr.rpc.settings import channel_options
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc
from integration.bench._decoder_fleet import GEOMETRY, MODEL, Decoder, start_decoders
from integration.bench._gateway_load import measure_added, measure_soak, measure_streams

RATE_PER_S = 500.0
HOLD_S = 1.0
REPORT_PERIOD_S = 0.5
WARM_UP_S = 3.0


@dataclass
class Calls:
    """Seconds of the calls of one run, and how late they began against the plan."""

    took_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failed: int = 0
    error: str = ""


def summary_ms(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def signatures(count: int, tokens: int = 200) -> list[bytes]:
    """Serialised signatures of prompts with tastes of their own."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        taste = rng.normal(0, 1.5, (GEOMETRY.layers, 1, GEOMETRY.experts))
        noise = rng.gumbel(size=(GEOMETRY.layers, tokens, GEOMETRY.experts))
        picks = np.argpartition(-(taste + noise), GEOMETRY.top_k, axis=2)[:, :, : GEOMETRY.top_k]
        counts = np.stack(
            [np.bincount(row, minlength=GEOMETRY.experts) for row in picks.reshape(GEOMETRY.layers, -1)]
        )
        signature = ExpertSignature(
            GEOMETRY.fingerprint, GEOMETRY.top_k, tokens, tokens, counts.astype(np.uint32)
        )
        made.append(encode_signature(signature).SerializeToString())
    return made


class RouterProcess:
    """`eldr router` on one core, with these workers."""

    def __init__(self, workers: list[str], core: int) -> None:
        self._words = [word for worker in workers for word in ("--worker", worker)]
        self._core = core
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> str:
        """Its address."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eldr.cli.main", "router", "--listen", "127.0.0.1:0"),
            *self._words,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        os.sched_setaffinity(process.pid, {self._core})
        assert process.stdout is not None
        said = b""
        async for line in process.stdout:
            said += line
            if b"router_started" in line:
                plain = re.sub(r"\x1b\[[0-9;]*m", "", line.decode())
                self._reading = asyncio.create_task(_drop(process.stdout))
                return f"127.0.0.1:{re.search(r'port=([0-9]+)', plain)[1]}"  # type: ignore[index]
        raise SystemExit(f"the router did not start:\n{said.decode()}")

    def cpu_s(self) -> float:
        """Processor time that the router has used."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        await self._reading


async def _drop(stream: asyncio.StreamReader) -> None:
    async for _ in stream:
        pass


async def until_live(channel: grpc.aio.Channel, count: int, limit_s: float = 120.0) -> None:
    """Waits until the router has a report of every decoder."""
    stub = fleet_pb2_grpc.FleetServiceStub(channel)
    begun_s = time.monotonic()
    while True:
        answer = await stub.ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=10)
        live = sum(worker.health == fleet_pb2.WORKER_HEALTH_LIVE for worker in answer.workers)
        if live == count:
            return
        if time.monotonic() - begun_s > limit_s:
            raise SystemExit(f"{live} of {count} decoders are live after {limit_s:g} s")
        await asyncio.sleep(0.5)


async def offer(
    channel: grpc.aio.Channel, decoders: list[Decoder], queries: list[routing_pb2.DecodeQuery], seconds: float
) -> Calls:
    """ReserveDecode at RATE_PER_S for a while; every booking is carried at once and released after HOLD_S."""
    stub = routing_pb2_grpc.RouterServiceStub(channel)
    by_id = {decoder.worker_id: decoder for decoder in decoders}
    calls = Calls()

    async def one(index: int, due_s: float, counts: bool) -> None:
        request = routing_pb2.ReserveDecodeRequest(
            reservation_id=uuid.uuid4().hex, query=queries[index % len(queries)]
        )
        begun_s = time.perf_counter()
        try:
            answer = await stub.ReserveDecode(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            calls.failed += 1
            calls.error = f"{error.code().name}: {error.details()}"
            return
        if counts:
            calls.took_s.append(time.perf_counter() - begun_s)
            calls.late_s.append(begun_s - due_s)
        carried = by_id[answer.decision.worker.worker_id].carried
        carried.add(answer.reservation_id)
        await asyncio.sleep(HOLD_S)
        carried.discard(answer.reservation_id)
        release = routing_pb2.ReleaseDecodeRequest(
            reservation_id=answer.reservation_id, outcome=routing_pb2.OUTCOME_COMPLETED, output_tokens=64
        )
        try:
            await stub.ReleaseDecode(release, timeout=5)
        except grpc.aio.AioRpcError:
            calls.failed += 1

    first_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(int(RATE_PER_S * (WARM_UP_S + seconds))):
            due_s = first_s + index / RATE_PER_S
            if (pause_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(pause_s)
            group.create_task(one(index, due_s, due_s - first_s >= WARM_UP_S))
    return calls


async def reserve(count: int, seconds: float) -> dict[str, float]:
    """One line of the table; see the top of this file."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[1:]))
    queries = [routing_pb2.DecodeQuery(model=MODEL, prompt_tokens=200, max_tokens=64) for _ in range(64)]
    for query, signature in zip(queries, signatures(len(queries)), strict=True):
        query.signature.ParseFromString(signature)
    decoders = await start_decoders(count, REPORT_PERIOD_S)
    process = RouterProcess([decoder.address for decoder in decoders], cores[0])
    try:
        async with (
            process as address,
            grpc.aio.insecure_channel(address, options=channel_options()) as channel,
        ):
            await until_live(channel, count)
            cpu_s, begun_s = process.cpu_s(), time.monotonic()
            calls = await offer(channel, decoders, queries, seconds)
            share = (process.cpu_s() - cpu_s) / (time.monotonic() - begun_s)
    finally:
        os.sched_setaffinity(0, set(cores))
        await asyncio.gather(*(decoder.stop() for decoder in decoders))
    if not calls.took_s:
        raise SystemExit(f"all {calls.failed} calls failed, the last with {calls.error}")
    late = summary_ms(calls.late_s)["p99"]
    row = {
        **summary_ms(calls.took_s),
        "late_p99": late,
        "router_cpu": round(share, 2),
        "failed": calls.failed,
    }
    print(
        f"{count:5} decoders  " + "  ".join(f"{key} {value:8.3f}" for key, value in row.items()), flush=True
    )
    return row


async def measure_reserve(quick: bool) -> dict[str, Any]:
    """`reserve_ms`."""
    print("ReserveDecode, milliseconds; router_cpu in cores")
    return {"reserve_ms": {str(count): await reserve(count, 3.0 if quick else 20.0) for count in (16, 512)}}


PARTS: dict[str, Callable[[bool], Awaitable[dict[str, Any]]]] = {
    "reserve": measure_reserve,
    "added": measure_added,
    "streams": measure_streams,
    "soak": measure_soak,
}
"""Each part prints its table and gives its keys of the JSON file; the argument says whether to be quick."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds for each figure")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--only", choices=sorted(PARTS), action="append", help="this part; repeat it for more"
    )
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in arguments.only or PARTS:
        results |= asyncio.run(PARTS[name](arguments.quick))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
