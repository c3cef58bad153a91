"""The KV of a prompt that waits at a prefill worker for a decoder, and its release over gRPC."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eldr.client import WorkerClient, WorkerRef
from eldr.gateway.bookings import PrefillBooking, Releases
from eldr.gateway.counters import Event
from eldr.gateway.errors import LegError, WorkerRefusalError
from eldr.gateway.legs import PrefillReply
from eldr.rpc.calling import Caller
from eldr.signature.expert_signature import ExpertSignature

UNSEEN_DELAY_S = 2.0
"""How long after a leg without an answer the release goes out: by then the engine has finished or aborted it."""

MAX_CHANNELS = 64
"""Workers to which a channel is kept."""


class WorkerClients:
    """Channels to workers, the least recently used closed first. `close` closes all."""

    def __init__(self, caller: Caller | None = None) -> None:
        self._caller = caller
        self._clients: OrderedDict[str, WorkerClient] = OrderedDict()

    async def release_transfer(self, grpc_address: str, transfer_id: str, incarnation: str) -> bool:
        """False when the transfer was not held. Raises WorkerError."""
        return await (await self._client(grpc_address)).release_transfer(transfer_id, incarnation)

    async def decode_counts(self, grpc_address: str, reservation_id: str) -> ExpertSignature:
        """Counts that a decoder has kept of a request. Raises WorkerError, and CodecError on what are none."""
        return await (await self._client(grpc_address)).get_decode_counts(reservation_id)

    async def _client(self, grpc_address: str) -> WorkerClient:
        client = self._clients.setdefault(grpc_address, WorkerClient(grpc_address, caller=self._caller))
        self._clients.move_to_end(grpc_address)
        while len(self._clients) > MAX_CHANNELS:
            _, oldest = self._clients.popitem(last=False)
            await oldest.close()
        return client

    async def close(self) -> None:
        """Calls in flight are cancelled."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()


class Transfer:
    """Held from the moment the prefill leg is sent, under the id of the leg until the answer names its own.

    `release` is synchronous and idempotent, like that of a booking.
    """

    def __init__(self, releases: Releases, worker: WorkerRef, leg_id: str) -> None:
        self._releases = releases
        self._worker = worker
        self._id = leg_id
        self._delay_s = UNSEEN_DELAY_S
        self._held = True

    def answered(self, transfer_id: str) -> None:
        """The prefill worker has named the transfer."""
        self._id = transfer_id
        self._delay_s = 0.0

    def ended(self) -> None:
        """Nothing is held any more: a decoder answered out of it, or the prefill worker took no request."""
        self._held = False

    @contextmanager
    def ends_unless_reached(self) -> Iterator[None]:
        """Around the prefill leg: a worker that refused or never saw the request holds nothing."""
        try:
            yield
        except WorkerRefusalError:
            self.ended()
            raise
        except LegError as error:
            if not error.reached:
                self.ended()
            raise

    def release(self) -> None:
        """Frees the KV at the prefill worker (cases 2.2, 2.30), not left to its lease."""
        if self._held:
            self._held = False
            self._releases.start(self._release())

    async def _release(self) -> None:
        await asyncio.sleep(self._delay_s)
        released = await self._releases.call("Transfer", self._id, self._give_back)
        self._releases.counts[Event.TRANSFER_RELEASED] += released

    async def _give_back(self) -> bool:
        return await self._releases.release_transfer(
            self._worker.grpc_address, self._id, self._worker.incarnation
        )


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill leg hands to a decode leg. `taken_at_s` is when it was ready, by the coordinator's clock."""

    worker: WorkerRef
    booking: PrefillBooking
    transfer: Transfer
    reply: PrefillReply
    taken_at_s: float
