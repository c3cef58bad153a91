"""One event to many readers; a slow reader loses the oldest and learns how many."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Event = TypeVar("Event")


class _Reader(Generic[Event]):
    def __init__(self, backlog: int) -> None:
        self._events: deque[Event] = deque(maxlen=backlog)
        self._dropped = 0
        self._closed = False
        self._ready = asyncio.Event()

    def push(self, event: Event) -> None:
        self._dropped += len(self._events) == self._events.maxlen
        self._events.append(event)
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    def __aiter__(self) -> AsyncIterator[tuple[Event, int]]:
        return self

    async def __anext__(self) -> tuple[Event, int]:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._events.popleft(), self._dropped


class Broadcast(Generic[Event]):
    """`publish` never waits. A reader sees everything that is published while it is subscribed."""

    def __init__(self, backlog: int = 256) -> None:
        self._backlog = backlog
        self._readers: set[_Reader[Event]] = set()

    @property
    def readers(self) -> int:
        """Number of readers now."""
        return len(self._readers)

    def publish(self, event: Event) -> None:
        """Hands an event to every reader."""
        for reader in self._readers:
            reader.push(event)

    def close(self) -> None:
        """Readers end after what they already have."""
        for reader in self._readers:
            reader.close()

    @contextmanager
    def subscribe(self) -> Iterator[AsyncIterator[tuple[Event, int]]]:
        """Events from now on, each with the number of events that this reader has lost so far."""
        reader: _Reader[Event] = _Reader(self._backlog)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
