"""Counts of live traffic: samples of a gateway's requests as counts files, off the request path."""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import structlog

from eldr.calibration.counts_file import save_counts
from eldr.client import CodecError, RouterError, WorkerError, WorkerStatus
from eldr.gateway.counters import Counts as EventCounts
from eldr.gateway.counters import Event
from eldr.gateway.sampling import FinishedRequest
from eldr.recording.request_counts import (
    PartialCountsError,
    RequestCounts,
    RequestCountsError,
    counts_of,
)
from eldr.rpc.codec import signature_from_text
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

PATTERN = "live-*.npz"
DEFAULT_SHARE = 0.01
DEFAULT_MAX_BYTES = 256 << 20
STOP_S = 5.0
"""How long a stopping recorder waits for decoders that do not answer."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What is recorded, and the bounds of it. Raises ValueError naming field, value and range.

    share: of the requests, 0 to 1.
    file_requests: requests a file; as many are held in memory.
    flush_s: seconds after which a file is written though it is not full.
    max_bytes: of all files together; the oldest are removed.
    queue: finished requests that wait to be joined; what comes on top is dropped and counted.
    settle_s: between the end of an answer and the question for its counts. vLLM's front end finds stop strings, and
        the engine hears of them a moment after the client has its last token.
    """

    folder: Path
    share: float = DEFAULT_SHARE
    file_requests: int = 256
    flush_s: float = 300.0
    max_bytes: int = DEFAULT_MAX_BYTES
    queue: int = 1024
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        for name in ("file_requests", "max_bytes", "queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, low in (("flush_s", 0.001), ("settle_s", 0.0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")


class ReadCounts(Protocol):
    """`WorkerClients.decode_counts`, or what stands in for it."""

    async def __call__(self, grpc_address: str, reservation_id: str) -> ExpertSignature: ...


class LiveRecorder:
    """A CountSampler. `start` and `stop` on the loop that serves.

    `workers` gives the fleet, for the indices of the model's MoE layers; `draw` gives uniform numbers of [0, 1).
    """

    def __init__(
        self,
        settings: LiveSettings,
        counts: EventCounts,
        read_counts: ReadCounts,
        workers: Callable[[], Awaitable[Sequence[WorkerStatus]]],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._read_counts = read_counts
        self._workers = workers
        self._draw = draw
        self._queue: asyncio.Queue[tuple[float, FinishedRequest]] = asyncio.Queue(settings.queue)
        self._rows: list[RequestCounts] = []
        self._moe_layers: dict[str, tuple[int, ...]] = {}
        self._joining = 0
        self._files = 0
        self._process = uuid.uuid4().hex[:8]
        self._task: asyncio.Task[None] | None = None

    def wanted(self) -> bool:
        """See CountSampler."""
        return self._draw() < self._settings.share

    def offer(self, finished: FinishedRequest) -> None:
        """See CountSampler. A full queue drops the request and counts it."""
        try:
            due_s = asyncio.get_running_loop().time() + self._settings.settle_s
            self._queue.put_nowait((due_s, finished))
        except asyncio.QueueFull:
            self._counts[Event.COUNTS_DROPPED] += 1

    def start(self) -> None:
        """Makes the folder and starts to join. Raises OSError where the folder cannot be made."""
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_log_death)

    async def stop(self) -> None:
        """Joins what waits, within STOP_S, and writes the last file."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(STOP_S):
                await self._queue.join()
        except TimeoutError:
            self._counts[Event.COUNTS_DROPPED] += self._queue.qsize() + self._joining
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._write()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self._settings.flush_s
        while True:
            try:
                async with asyncio.timeout_at(due):
                    settled_s, finished = await self._queue.get()
            except TimeoutError:
                await self._write()
                due = loop.time() + self._settings.flush_s
                continue
            self._joining = 1
            try:
                await asyncio.sleep(max(0.0, settled_s - loop.time()))
                await self._take(finished)
                if len(self._rows) >= self._settings.file_requests:
                    await self._write()
                    due = loop.time() + self._settings.flush_s
                self._joining = 0
            finally:
                self._queue.task_done()

    async def _take(self, finished: FinishedRequest) -> None:
        """Joins the legs of a request; why one is left out is counted."""
        try:
            prefill = signature_from_text(finished.signature)
            decode = None
            if finished.decode_grpc:
                decode = await self._read_counts(finished.decode_grpc, finished.id)
            row = RequestCounts(finished.id, prefill, decode, finished.domain)
        except WorkerError as error:
            self._counts[Event.COUNTS_MISSING] += 1
            log.info("live_counts_missing", request=finished.id, error=str(error))
            return
        except PartialCountsError:
            self._counts[Event.COUNTS_PARTIAL] += 1
            return
        except (CodecError, RequestCountsError) as error:
            self._counts[Event.COUNTS_REFUSED] += 1
            log.warning("live_counts_refused", request=finished.id, error=str(error))
            return
        if not await self._knows_layers(prefill):
            self._counts[Event.COUNTS_UNPLACED] += 1
            return
        if self._rows and self._rows[0].prefill.fingerprint != prefill.fingerprint:
            await self._write()
        self._rows.append(row)
        self._counts[Event.COUNTS_RECORDED] += 1

    async def _knows_layers(self, signature: ExpertSignature) -> bool:
        """Whether the fleet has the signature's model, whose layer indices a profile needs; asked once a model."""
        if signature.fingerprint not in self._moe_layers:
            try:
                fleet = await self._workers()
            except (RouterError, CodecError) as error:
                log.warning("live_counts_unplaced", error=str(error))
                return False
            known = {worker.info.geometry.fingerprint: worker.info.geometry for worker in fleet}
            geometry = known.get(signature.fingerprint)
            if geometry is None or geometry.shape != signature.shape:
                log.warning("live_counts_unplaced", fingerprint=signature.fingerprint)
                return False
            self._moe_layers[signature.fingerprint] = geometry.moe_layers
        return True

    async def _write(self) -> None:
        """The rows so far as one file, then the oldest files go that are over the bound."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        self._files += 1
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self._settings.folder / f"live-{stamp}-{self._process}-{self._files:06d}.npz"
        counts = counts_of(rows, self._moe_layers[rows[0].prefill.fingerprint])
        try:
            await asyncio.to_thread(save_counts, counts, path)
        except OSError as error:
            self._counts[Event.COUNTS_UNWRITTEN] += len(rows)
            log.warning("live_counts_unwritten", path=str(path), requests=len(rows), error=str(error))
            return
        log.info("live_counts_written", path=str(path), requests=len(rows))
        try:
            await asyncio.to_thread(remove_oldest, self._settings.folder, self._settings.max_bytes)
        except OSError as error:
            self._counts[Event.COUNTS_UNREMOVED] += 1
            log.warning("live_counts_not_removed", folder=str(self._settings.folder), error=str(error))


def _log_death(task: asyncio.Task[None]) -> None:
    """A recorder that ends by itself never goes unnoticed; the gateway serves on."""
    if not task.cancelled() and task.exception() is not None:
        log.error("live_recorder_ended", exc_info=task.exception())


def remove_oldest(folder: Path, max_bytes: int) -> int:
    """Removes the oldest of a recorder's files until all together take at most `max_bytes`; the newest stays.

    Returns how many went. Other files are left alone. Several gateways may share a folder. Raises OSError.
    """
    files = sorted(folder.glob(PATTERN), key=lambda path: path.name, reverse=True)
    total = removed = 0
    for number, path in enumerate(files):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # Another gateway was faster.
            continue
        if number and total > max_bytes:
            path.unlink(missing_ok=True)
            removed += 1
    return removed
