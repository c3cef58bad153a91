"""One event to many readers; a slow reader loses the oldest and learns how many."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

Event = TypeVar("Event")


class _Reader(Generic[Event]):
    def __init__(self, backlog: int) -> None:
        self.events: deque[Event] = deque(maxlen=backlog)
        self.dropped = 0
        self.ready = asyncio.Event()


class Broadcast(Generic[Event]):
    """`publish` never waits. Readers see what is published after they began."""

    def __init__(self, backlog: int = 256) -> None:
        self._backlog = backlog
        self._readers: set[_Reader[Event]] = set()
        self._closed = False

    @property
    def readers(self) -> int:
        """Number of readers now."""
        return len(self._readers)

    def publish(self, event: Event) -> None:
        """Hands an event to every reader."""
        for reader in self._readers:
            reader.dropped += len(reader.events) == self._backlog
            reader.events.append(event)
            reader.ready.set()

    def close(self) -> None:
        """Readers end after what they already have."""
        self._closed = True
        for reader in self._readers:
            reader.ready.set()

    async def watch(self) -> AsyncGenerator[tuple[Event, int], None]:
        """Events with the number of events lost so far."""
        reader: _Reader[Event] = _Reader(self._backlog)
        self._readers.add(reader)
        try:
            while not self._closed:
                await reader.ready.wait()
                reader.ready.clear()
                while reader.events:
                    yield reader.events.popleft(), reader.dropped
        finally:
            self._readers.discard(reader)
