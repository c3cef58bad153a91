"""A whole fleet in one process: fake engines, a router that records, the real gateway, an HTTP client."""

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import aiohttp
import grpc

from eldr.client import (
    Decision,
    DecodeReservation,
    FleetSnapshot,
    NoWorkerError,
    Outcome,
    PrefillReservation,
    WorkerHealth,
    WorkerInfo,
    WorkerRef,
    WorkerRole,
    WorkerStatus,
)
from eldr.gateway.bookings import Releases
from eldr.gateway.coordinator import Coordinator
from eldr.gateway.counters import Counts
from eldr.gateway.decoded import DecodedCounts, ReadCounts
from eldr.gateway.engine_client import EngineClient
from eldr.gateway.sampling import CountSampler
from eldr.gateway.server import GatewayServer
from eldr.gateway.settings import GatewaySettings
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry
from eldr.testing.fake_engine import FakeEngine, FakeTransfers
from eldr.testing.faults import Pause

GEOMETRY = ModelGeometry((0, 1), 8, 2, "fake-model")


class RecordingRouter:
    """Round robin over what is not excluded; remembers every call and what is still booked."""

    def __init__(self, prefills: list[FakeEngine], decodes: list[FakeEngine]) -> None:
        self.engines = {WorkerRole.PREFILL: prefills, WorkerRole.DECODE: decodes}
        self.booked: dict[str, str] = {}
        self.released: list[tuple[str, Outcome, int]] = []
        self.decoded: list[ExpertSignature | None] = []
        self.decode_queries: list[dict] = []
        self.prefixes: list[bytes] = []
        self.timeouts: list[float | None] = []
        self.error: Exception | None = None
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: Counter[str] = Counter()
        self.snapshots: asyncio.Queue[FleetSnapshot] = asyncio.Queue()
        self._turns = {role: itertools.count() for role in WorkerRole}

    async def _pick(self, role: WorkerRole, exclude: list[str], reservation_id: str) -> WorkerRef:
        if self.error:
            raise self.error
        free = [engine for engine in self.engines[role] if engine.worker_id not in exclude]
        if not free:
            raise NoWorkerError(grpc.StatusCode.UNAVAILABLE, f"no {role} worker is left")
        engine = free[next(self._turns[role]) % len(free)]
        self.booked[reservation_id] = engine.worker_id
        return WorkerRef(engine.worker_id, "i1", engine.url, f"grpc-of-{engine.worker_id}")

    async def _gate(self, name: str) -> None:
        if name in self.gates:
            self.waiting[name] += 1
            await self.gates[name].wait()

    async def select_prefill(
        self, *, model, prompt_prefix, reservation_id, exclude, timeout_s
    ) -> PrefillReservation:
        self.prefixes.append(prompt_prefix)
        self.timeouts.append(timeout_s)
        worker = await self._pick(WorkerRole.PREFILL, exclude, reservation_id)
        await self._gate("select_prefill")
        return PrefillReservation(reservation_id, worker, 60.0)

    async def release_prefill(self, reservation_id, outcome) -> bool:
        self.released.append(("prefill", outcome, 0))
        return self.booked.pop(reservation_id, None) is not None

    async def reserve_decode(self, **query) -> DecodeReservation:
        self.timeouts.append(query["timeout_s"])
        self.decode_queries.append(query)
        worker = await self._pick(WorkerRole.DECODE, query["exclude"], query["reservation_id"])
        self.booked.pop(query["prefill_reservation_id"], None)
        await self._gate("reserve_decode")
        decision = Decision(worker.worker_id, "round-robin", "its turn")
        return DecodeReservation(query["reservation_id"], worker, decision, 60.0)

    async def release_decode(self, reservation_id, outcome, output_tokens, decoded=None) -> bool:
        self.released.append(("decode", outcome, output_tokens))
        self.decoded.append(decoded)
        return self.booked.pop(reservation_id, None) is not None

    async def watch_fleet(self) -> AsyncIterator[FleetSnapshot]:
        while True:
            yield await self.snapshots.get()

    async def workers(self) -> list[WorkerStatus]:
        if self.error:
            raise self.error
        return [
            WorkerStatus(
                WorkerInfo(
                    worker_id=engine.worker_id,
                    incarnation="i1",
                    role=role,
                    http_url=engine.url,
                    grpc_address="127.0.0.1:1",
                    geometry=GEOMETRY,
                    served_model=engine.model,
                    block_size=16,
                    max_model_len=engine.max_model_len,
                ),
                WorkerHealth.LIVE,
                0,
                0.1,
                None,
                "",
            )
            for role, engines in self.engines.items()
            for engine in engines
        ]


class Fleet:
    """The gateway and everything around it. `plain` is one ordinary engine, for comparison."""

    def __init__(
        self,
        prefills: int,
        decodes: int,
        settings: GatewaySettings,
        sampler: CountSampler | None = None,
        read_counts: ReadCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.transfers = FakeTransfers()
        self.prefills = [FakeEngine(f"p{index}", self.transfers) for index in range(prefills)]
        self.decodes = [FakeEngine(f"d{index}", self.transfers) for index in range(decodes)]
        self.plain = FakeEngine("plain", FakeTransfers())
        self.router = RecordingRouter(self.prefills, self.decodes)
        self.counts = Counts()
        self.releases = Releases(self.router, self._release_transfer, self.counts)
        self.released_at: list[tuple[str, str]] = []
        self._settings = settings
        self._sampler = sampler
        self._decoded = read_counts and DecodedCounts(settings.learn_share, read_counts, self.counts)
        self._stack = contextlib.AsyncExitStack()

    async def _release_transfer(self, grpc_address: str, transfer_id: str, incarnation: str) -> bool:
        self.released_at.append((grpc_address, incarnation))
        return self.transfers.end(transfer_id, "released")

    async def start(self) -> None:
        for engine in (*self.prefills, *self.decodes, self.plain):
            await self._stack.enter_async_context(engine)
        self.engines = EngineClient(self._settings, self.counts)
        self._stack.push_async_callback(self.engines.close)
        self.coordinator = Coordinator(
            self.engines, self.releases, self._settings, self._clock, self._sampler, self._decoded
        )
        self.server = GatewayServer(self.coordinator, self.releases, self._settings, "1.2.3")
        address = await self.server.start("127.0.0.1", 0)
        self._stack.push_async_callback(self.server.stop, 0.0)
        self.url = f"http://{address}"
        self.http = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )

    async def stop(self) -> None:
        await self._stack.aclose()

    def post(self, path: str, body: object, **options):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(self.url + path, data=data, **options)

    async def complete(self, body: object, path: str = "/v1/completions", **options) -> tuple[int, dict]:
        async with self.post(path, body, **options) as response:
            return response.status, await response.json()

    async def stream(self, body: dict, path: str = "/v1/completions", **options) -> tuple[int, list[str]]:
        """Status and the data of every event."""
        async with self.post(path, {**body, "stream": True}, **options) as response:
            return response.status, events_of(await response.read())

    async def text_of_plain(self, body: dict, path: str = "/v1/completions") -> str:
        async with self.http.post(self.plain.url + path, json=body) as response:
            return text_of(await response.json())

    def pause(self, engines: list[FakeEngine], point: str) -> Pause:
        """One Pause for all of these engines."""
        pause = Pause()
        for engine in engines:
            engine.pauses[point] = pause
        return pause

    async def settled(self) -> None:
        await self.releases.settled()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what another task or socket brings about; fails after 30 s."""
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - the far end of a socket has no event
                await asyncio.sleep(0.002)

    def nothing_is_held(self) -> bool:
        return not self.router.booked and not self.transfers.held

    def sent_to(self, engines: list[FakeEngine]) -> list[dict]:
        return [dict(seen.body) for engine in engines for seen in engine.requests]


def events_of(raw: bytes) -> list[str]:
    """The data of every server-sent event."""
    return [event[6:] for event in raw.decode().split("\n\n") if event.startswith("data: ")]


def text_of(reply: dict) -> str:
    choice = reply["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed_text(events: list[str]) -> str:
    out = ""
    for event in events:
        if event == "[DONE]":
            continue
        for choice in json.loads(event)["choices"]:
            out += choice["text"] if "text" in choice else choice["delta"]["content"]
    return out
