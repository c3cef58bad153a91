"""What can go wrong with a request to a fake engine, and points at which requests wait for the test."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What goes wrong with one request."""

    STATUS = "status"
    """Answers with `status` and `message` at once."""
    HANG = "hang"
    """Takes the request and never answers."""
    RESET = "reset"
    """Takes the request and closes the connection."""
    ERROR_PAYLOAD = "error_payload"
    """HTTP 200 with an error object, in a stream after `after_tokens` and followed by [DONE] as vLLM does."""
    ERROR_FINISH = "error_finish"
    """HTTP 200 with finish_reason "error" and no text."""
    CUT = "cut"
    """The stream ends without [DONE] after `after_tokens`; a JSON answer breaks off."""
    STALL = "stall"
    """The stream falls silent after `after_tokens`."""
    NO_HANDOFF = "no_handoff"
    """A prefill reply without kv_transfer_params."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, for one request."""

    kind: FaultKind
    status: int = 500
    message: str = "made to fail"
    after_tokens: int = 0


class Pause:
    """A point that requests reach and wait at."""

    def __init__(self) -> None:
        self.reached = 0
        self._arrived = asyncio.Condition()
        self._open = asyncio.Event()

    async def wait_here(self) -> None:
        """For the engine."""
        async with self._arrived:
            self.reached += 1
            self._arrived.notify_all()
        await self._open.wait()

    async def wait_reached(self, count: int = 1) -> None:
        """Returns when `count` requests are or were here."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.reached >= count)

    def go_on(self) -> None:
        """Lets all go on, later ones too."""
        self._open.set()
