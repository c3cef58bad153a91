"""Bookings that a request holds at the router, given back whatever happens.

`release` is synchronous, idempotent and only starts the call, so that it runs through in any `finally`, under
cancellation too. The call itself belongs to Releases, not to the request.
"""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import structlog

from eldr.client import (
    CallError,
    DecodeReservation,
    FleetSnapshot,
    NoWorkerError,
    Outcome,
    PrefillReservation,
    WorkerStatus,
)
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerRefusalError
from eldr.gateway.legs import ClientRequest, ReplyError
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

RETRY_DELAYS_S = (0.2, 1.0)
"""Pauses before a failed release is tried again; after the last the router's own expiry takes over."""

R = TypeVar("R")


class Router(Protocol):
    """The part of `eldr.client.RouterClient` that the gateway uses."""

    async def select_prefill(
        self,
        *,
        model: str,
        prompt_prefix: bytes,
        reservation_id: str,
        exclude: list[str],
        timeout_s: float | None,
    ) -> PrefillReservation: ...

    async def release_prefill(self, reservation_id: str, outcome: Outcome) -> bool: ...

    async def reserve_decode(
        self,
        *,
        model: str,
        signature: str | None,
        prompt_tokens: int,
        max_tokens: int,
        domain: str,
        exclude: list[str],
        reservation_id: str,
        prefill_reservation_id: str,
        timeout_s: float | None,
    ) -> DecodeReservation: ...

    async def release_decode(
        self,
        reservation_id: str,
        outcome: Outcome,
        output_tokens: int,
        decoded: ExpertSignature | None,
    ) -> bool: ...

    async def workers(self) -> list[WorkerStatus]: ...

    def watch_fleet(self) -> AsyncIterator[FleetSnapshot]: ...


class TransferRelease(Protocol):
    """`WorkerClients.release_transfer`, or what stands in for it."""

    async def __call__(self, grpc_address: str, transfer_id: str, incarnation: str) -> bool: ...


class Releases:
    """Releases in flight. They outlive the requests that started them."""

    def __init__(self, router: Router, release_transfer: TransferRelease, counts: Counts) -> None:
        self.router = router
        self.release_transfer = release_transfer
        self.counts = counts
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a release to its end."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Returns when nothing is left to release."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def call(self, what: str, held_id: str, release: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """One release, tried again where the other side cannot be reached. False when it was not held."""
        for delay_s in (*RETRY_DELAYS_S, None):
            try:
                return await release()
            except CallError as error:
                if delay_s is None:
                    self.counts[Event.RELEASE_FAILED] += 1
                    log.warning("release_failed", what=what, id=held_id, error=str(error))
                    return False
            await asyncio.sleep(delay_s)
        raise AssertionError("the last delay is None")


class _Booking(ABC):
    """A booking under an id of our own, known before the router has answered.

    The reservation is shielded: a client that leaves while it is on its way cannot leave a booking behind
    that nobody knows of, since the release waits for the answer.
    """

    def __init__(self, releases: Releases) -> None:
        self.id = uuid.uuid4().hex
        self.outcome = Outcome.CANCELLED
        self._releases = releases
        self._call: asyncio.Task[Any] | None = None

    async def _reserve(self, call: Coroutine[Any, Any, R]) -> R:
        self._call = task = asyncio.ensure_future(call)
        return await asyncio.shield(task)

    @contextmanager
    def ends_with_the_leg(self, worker_id: str) -> Iterator[None]:
        """Gives the booking back at once where the leg in it fails, with the outcome that fits.

        An HTTP 200 that is no answer (ReplyError) leaves as a LegError of the worker.
        """
        try:
            yield
        except WorkerRefusalError:
            self.outcome = Outcome.CLIENT_ERROR
            self.release()
            raise
        except LegError as error:
            self.outcome = error.outcome
            self.release()
            raise
        except ReplyError as error:
            self.outcome = Outcome.WORKER_ERROR
            self.release()
            raise LegError(worker_id, str(error), outcome=self.outcome) from error

    def release(self) -> None:
        """Gives the booking back with `outcome`. Later calls do nothing."""
        if self._call is not None:
            self._releases.start(self._release(self._call))
            self._call = None

    async def _release(self, reserving: asyncio.Task[Any]) -> None:
        await asyncio.wait([reserving])
        if isinstance(reserving.exception(), NoWorkerError):
            return
        await self._releases.call(type(self).__name__, self.id, self._give_back)

    @abstractmethod
    async def _give_back(self) -> bool:
        """Ends the booking at the router; whether there was one."""


class PrefillBooking(_Booking):
    """A booked prefill worker. ReserveDecode ends the booking, else `release` does."""

    async def reserve(
        self, model: str, prompt_prefix: bytes, exclude: list[str], timeout_s: float | None = None
    ) -> PrefillReservation:
        """Raises RouterError."""
        return await self._reserve(
            self._releases.router.select_prefill(
                model=model,
                prompt_prefix=prompt_prefix,
                reservation_id=self.id,
                exclude=exclude,
                timeout_s=timeout_s,
            )
        )

    def ended(self) -> None:
        """The router has dropped the booking itself."""
        self._call = None

    async def _give_back(self) -> bool:
        return await self._releases.router.release_prefill(self.id, self.outcome)


class DecodeBooking(_Booking):
    """A booked decode worker. `output_tokens` is reported with the release.

    `on_completed` is called when the answer has ended well; `read_decoded` then gives the decode counts that
    travel with the release, None where there are none.
    """

    def __init__(self, releases: Releases) -> None:
        super().__init__(releases)
        self.output_tokens: Callable[[], int] = int
        self.on_completed: Callable[[], None] = lambda: None
        self.read_decoded: Callable[[], Coroutine[Any, Any, ExpertSignature | None]] | None = None
        self._decoded: ExpertSignature | None = None

    def completed(self) -> None:
        """The answer has ended well."""
        self.outcome = Outcome.COMPLETED
        self.on_completed()

    async def reserve(
        self,
        request: ClientRequest,
        prefill: PrefillBooking | None,
        prompt_tokens: int,
        signature: str | None,
        exclude: list[str],
        timeout_s: float | None = None,
    ) -> DecodeReservation:
        """Raises RouterError, and CodecError on a signature that is none. Ends the prefill booking, if any."""
        reservation = await self._reserve(
            self._releases.router.reserve_decode(
                model=request.model,
                signature=signature,
                prompt_tokens=prompt_tokens,
                max_tokens=request.max_tokens,
                domain=request.domain,
                exclude=exclude,
                reservation_id=self.id,
                prefill_reservation_id=prefill.id if prefill else "",
                timeout_s=timeout_s,
            )
        )
        if prefill is not None:
            prefill.ended()
        return reservation

    async def _release(self, reserving: asyncio.Task[Any]) -> None:
        if self.outcome is Outcome.COMPLETED and self.read_decoded is not None:
            self._decoded = await self.read_decoded()
        await super()._release(reserving)

    async def _give_back(self) -> bool:
        return await self._releases.router.release_decode(
            self.id, self.outcome, self.output_tokens(), self._decoded
        )
