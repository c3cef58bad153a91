"""Bookings: what the router placed and has not seen end. Synchronous; the time is passed in."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from eldr.routing.contract import Booking

Answer = TypeVar("Answer")

LEFT_S = 2.0
"""Life of a booking after its request has left the engine's reports."""


class AlreadyReleasedError(Exception):
    """A booking id comes again after its release."""


@dataclass(slots=True)
class Entry(Generic[Answer]):
    """One booking, where it lies, and the answer that a replay of the same id gets again.

    `carried` is true once a report of the worker has named it.
    """

    booking: Booking
    worker_id: str
    answer: Answer
    expires_at_s: float
    ttl_s: float
    carried: bool = False


class Ledger(Generic[Answer]):
    """Bookings by id and by worker.

    Invariants: an id has at most one booking; every booking ends by release, by expiry or with its worker,
    and what ended is in no index. Ids that were released, or whose release came first, stay known for
    `remember_s`, so that a late replay books nothing.
    """

    MAX_REMEMBERED = 100_000

    def __init__(self, ttl_s: float, remember_s: float = 60.0) -> None:
        self._ttl_s = ttl_s
        self._remember_s = remember_s
        self._entries: dict[str, Entry[Answer]] = {}
        self._by_worker: dict[str, dict[str, Booking]] = {}
        self._released: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def ttl_s(self) -> float:
        """Seconds that a booking lasts without being carried by a report."""
        return self._ttl_s

    @property
    def remembered(self) -> int:
        """Ids that are known as released."""
        return len(self._released)

    def get(self, reservation_id: str) -> Entry[Answer] | None:
        """The live booking of an id, None where there is none."""
        return self._entries.get(reservation_id)

    def find(self, reservation_id: str, now_s: float) -> Entry[Answer] | None:
        """The live booking of an id. AlreadyReleasedError where it has ended, or its release came first."""
        entry = self._entries.get(reservation_id)
        if entry is None and self._released.get(reservation_id, now_s) > now_s:
            raise AlreadyReleasedError(f"reservation_id {reservation_id} was already released")
        return entry

    def reserve(self, worker_id: str, booking: Booking, answer: Answer, now_s: float) -> Entry[Answer]:
        """Books. The id must be free: call `find` first, with no wait in between."""
        if booking.reservation_id in self._entries:
            raise ValueError(f"reservation_id {booking.reservation_id} is booked already")
        entry = Entry(booking, worker_id, answer, now_s + self._ttl_s, self._ttl_s)
        self._entries[booking.reservation_id] = entry
        self._by_worker.setdefault(worker_id, {})[booking.reservation_id] = booking
        return entry

    def release(self, reservation_id: str, now_s: float) -> Entry[Answer] | None:
        """Ends a booking; None where there was none. The id is remembered either way."""
        self._released.pop(reservation_id, None)
        self._released[reservation_id] = now_s + self._remember_s
        while len(self._released) > self.MAX_REMEMBERED:
            self._released.popitem(last=False)
        return self._drop(reservation_id)

    def carry(self, worker_id: str, reservation_ids: frozenset[str], now_s: float) -> None:
        """Takes a report of a worker in: renews the bookings that it names.

        One that an earlier report has named and this one does not has ended in the engine. Its holder has
        LEFT_S to say how; then it is over, as where the holder has died.
        """
        for reservation_id in self._by_worker.get(worker_id, {}):
            entry = self._entries[reservation_id]
            if reservation_id in reservation_ids:
                entry.expires_at_s = now_s + entry.ttl_s
                entry.carried = True
            elif entry.carried:
                entry.carried = False
                entry.expires_at_s = min(entry.expires_at_s, now_s + LEFT_S)

    def expire(self, now_s: float) -> list[Entry[Answer]]:
        """Ends every booking whose time is over, in one pass over the whole table, whatever its order."""
        over = [rid for rid, entry in self._entries.items() if entry.expires_at_s <= now_s]
        # Each release puts its id at the end for the same time, so here the order is that of expiry.
        while self._released and next(iter(self._released.values())) <= now_s:
            self._released.popitem(last=False)
        return [entry for rid in over if (entry := self._drop(rid)) is not None]

    def drop_worker(self, worker_id: str) -> int:
        """Ends every booking of a worker; returns how many there were."""
        mine = list(self._by_worker.get(worker_id, {}))
        for reservation_id in mine:
            self._drop(reservation_id)
        return len(mine)

    def bookings(self, worker_id: str) -> Mapping[str, Booking]:
        """Bookings of a worker in the order they were made; a view that changes with the ledger."""
        return self._by_worker.get(worker_id, {})

    def _drop(self, reservation_id: str) -> Entry[Answer] | None:
        entry = self._entries.pop(reservation_id, None)
        if entry is not None:
            mine = self._by_worker[entry.worker_id]
            del mine[reservation_id]
            if not mine:
                del self._by_worker[entry.worker_id]
        return entry
