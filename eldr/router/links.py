"""Connections that the router keeps to its workers: one task per worker, and one per address still to be found.

A decode worker's state comes over one long stream, read again from its beginning after every break; a prefill
worker is asked for its info in turn. Nothing here compares two machines' clocks.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import structlog

from eldr.calibration.profile import ProfileMismatchError
from eldr.client.errors import WorkerError
from eldr.client.worker_client import WorkerClient
from eldr.router.core import RouterCore
from eldr.router.errors import AddressNotAllowedError
from eldr.router.fleet import FleetMismatchError, Report
from eldr.routing.state import DecoderState
from eldr.rpc.calling import Caller
from eldr.rpc.codec import CodecError
from eldr.rpc.worker_info import WorkerInfo, WorkerRole

log = structlog.get_logger()

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 0.5
"""Short, since the channel beneath paces its own dialling (`MAX_RECONNECT_BACKOFF_S`)."""

PREPARE_S = 0.005
"""In a fleet of hundreds, reports come more often than decisions."""

LINK_ERRORS = (
    WorkerError,
    CodecError,
    FleetMismatchError,
    AddressNotAllowedError,
    ProfileMismatchError,
    TimeoutError,
)
FOREIGN = (Report.OTHER_INCARNATION, Report.UNKNOWN_WORKER)


class Backoff:
    """Pauses that double from FIRST_BACKOFF_S to LAST_BACKOFF_S, each shortened at random by up to a half."""

    def __init__(self) -> None:
        self._pause_s = FIRST_BACKOFF_S

    def reset(self) -> None:
        """The next pause is the first again."""
        self._pause_s = FIRST_BACKOFF_S

    async def wait(self) -> None:
        """Waits for the next pause."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LAST_BACKOFF_S)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))


class Links:
    """Keeps one task per member of the fleet. `sync` after every change of membership."""

    def __init__(self, core: RouterCore, caller: Caller) -> None:
        self._core = core
        self._caller = caller
        self._tasks: dict[WorkerInfo, asyncio.Task[None]] = {}
        self._searches: dict[str, asyncio.Task[None]] = {}
        self._notices: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._to_prepare: set[str] = set()

    def search(self, address: str) -> None:
        """Registers whatever worker answers at an address, as soon as it does, and its successors there."""
        if address not in self._searches:
            self._searches[address] = asyncio.create_task(self._search(address), name=f"search {address}")

    def give_up(self, address: str) -> None:
        """Looks there no longer. A worker that was found there stays."""
        task = self._searches.pop(address, None)
        if task is not None:
            task.cancel()

    def sync(self) -> None:
        """Starts and ends tasks so that there is one for every member, and one notice for every draining one."""
        members = self._core.fleet.members()
        wanted = {member.info for member in members}
        for info in self._tasks.keys() - wanted:
            self._tasks.pop(info).cancel()
        for info in wanted - self._tasks.keys():
            work = self._follow(info) if info.role is WorkerRole.DECODE else self._probe(info)
            self._tasks[info] = asyncio.create_task(work, name=f"link {info.worker_id}")
        leaving = {(m.info.worker_id, m.info.incarnation): m.info for m in members if m.draining}
        for process in self._notices.keys() - leaving:
            self._notices.pop(process).cancel()
        for process, info in leaving.items():
            if process not in self._notices and info.role is WorkerRole.DECODE:
                self._notices[process] = asyncio.create_task(
                    self._tell_to_drain(info), name=f"drain {info.worker_id}"
                )

    async def close(self) -> None:
        """Ends every task."""
        tasks = [*self._tasks.values(), *self._searches.values(), *self._notices.values()]
        self._tasks.clear()
        self._notices.clear()
        self._searches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self, address: str) -> None:
        problem = ""
        found: WorkerInfo | None = None
        async with WorkerClient(address, caller=self._caller) as client:
            while True:
                try:
                    # A worker that shows signs of life is its link's business.
                    if found is None or not self._core.fleet.is_well(found, self._core.now_s()):
                        found = await client.get_info()
                        self._core.register(found)
                    problem = ""
                except LINK_ERRORS as error:
                    if str(error) != problem:
                        problem = str(error)
                        log.warning("worker_not_registered", address=address, why=problem)
                await asyncio.sleep(self._core.settings.probe_period_s)

    async def _follow(self, info: WorkerInfo) -> None:
        backoff = Backoff()
        async with WorkerClient(info.grpc_address, caller=self._caller) as client:
            while True:
                try:
                    async with aclosing(client.watch_state(self._core.settings.report_period_s)) as reports:
                        async for state in _each_within(reports, self._core.settings.health.dead_s):
                            if state.worker_id != info.worker_id or self._core.report(state) in FOREIGN:
                                break
                            self._prepare_soon(info.served_model)
                            backoff.reset()
                    await backoff.wait()
                    # The process behind the address may be another one by now.
                    self._core.register(await client.get_info())
                except LINK_ERRORS as error:
                    self._broken(info, error)
                    await backoff.wait()

    async def _probe(self, info: WorkerInfo) -> None:
        async with WorkerClient(info.grpc_address, caller=self._caller) as client:
            while True:
                try:
                    status = await client.get_prefill_status()
                    self._core.register(status.info)
                    self._core.held(status.info, status.held_transfers)
                except LINK_ERRORS as error:
                    self._broken(info, error)
                await asyncio.sleep(self._core.settings.probe_period_s)

    def _prepare_soon(self, model: str) -> None:
        """Readies the next decision once for all reports that come within PREPARE_S."""
        if model not in self._to_prepare:
            self._to_prepare.add(model)
            asyncio.get_running_loop().call_later(PREPARE_S, self._prepare, model)

    def _prepare(self, model: str) -> None:
        self._to_prepare.discard(model)
        self._core.prepare(model)

    async def _tell_to_drain(self, info: WorkerInfo) -> None:
        """Has the engine itself report that it drains, so that every router hears of it."""
        backoff = Backoff()
        async with WorkerClient(info.grpc_address, caller=self._caller) as client:
            while True:
                try:
                    await client.drain()
                    log.info("worker_told_to_drain", worker_id=info.worker_id)
                    return
                except WorkerError as error:
                    self._broken(info, error)
                    await backoff.wait()

    def _broken(self, info: WorkerInfo, error: Exception) -> None:
        self._core.counters.add("eldr_link_errors_total", worker_id=info.worker_id)
        log.info("worker_link_error", worker_id=info.worker_id, why=str(error) or type(error).__name__)


async def _each_within(reports: AsyncIterator[DecoderState], limit_s: float) -> AsyncIterator[DecoderState]:
    """The same reports; TimeoutError where the next one takes longer than `limit_s`."""
    while True:
        try:
            async with asyncio.timeout(limit_s):
                state = await anext(reports)
        except StopAsyncIteration:
            return
        yield state
