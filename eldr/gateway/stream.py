"""Server-sent events from a decoder to a client: the bytes pass untouched, the events are only looked at."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from eldr.gateway.engine_client import transport_error
from eldr.gateway.errors import LegError
from eldr.gateway.legs import ReplyError, failure_of, usage_of
from eldr.rpc.outcome import Outcome

_END = b"\n\n"

_DRAIN_S = 0.2
"""How long the end of the HTTP body may come after the stream's own end."""


class EventRelay:
    """Relays one stream in blocks of whole events.

    A stream ends well with `data: [DONE]` and nothing else. On an error event, a choice with finish_reason
    "error", a broken connection, silence or a missing [DONE] a LegError is raised in its place (case 2.18);
    the events before it are relayed. `wait` limits the wait for the next bytes. `rewrite` makes of an event what
    the client gets; its ReplyError is a failure too.
    """

    def __init__(
        self,
        worker_id: str,
        content: aiohttp.StreamReader,
        wait: Callable[[], AbstractAsyncContextManager[None]],
        rewrite: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self._worker_id = worker_id
        self._content = content
        self._wait = wait
        self._rewrite = rewrite
        self._buffer = b""
        self._first = b""
        self._done = False
        self._failure: LegError | None = None
        self._chunks = 0
        self._usage_tokens = 0

    @property
    def output_tokens(self) -> int:
        """Completion tokens of the usage event, else the number of chunks with choices so far."""
        return self._usage_tokens or self._chunks

    async def open(self) -> None:
        """Waits for the first event, so that a failure before it still has an HTTP status of its own.

        Raises LegError. The caller sets the time limit. Comments (keep-alive) are no events.
        """
        while not (self._chunks or self._done):
            self._first += self._take(await self._read())
            if self._failure:
                raise self._failure

    async def blocks(self) -> AsyncIterator[bytes]:
        """The stream from its first event on. Raises LegError where it does not end well."""
        yield self._first
        while not (self._done or self._failure):
            async with self._wait():
                data = await self._read()
            block = self._take(data)
            if block:
                yield block
        if self._failure:
            raise self._failure
        await self._drain()

    async def _drain(self) -> None:
        """Reads the end of the HTTP body after [DONE], so that the connection can be used again."""
        with contextlib.suppress(TimeoutError, LegError):
            async with asyncio.timeout(_DRAIN_S):
                while await self._read():
                    pass

    async def _read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise transport_error(self._worker_id, error) from error

    def _take(self, data: bytes) -> bytes:
        """Whole events up to the end or the first failure."""
        if not data:
            self._failure = self._failed("the stream ended without [DONE]", retryable=True)
            return b""
        ready, end, rest = (self._buffer + data).rpartition(_END)
        self._buffer = rest
        relayed = []
        for event in ready.split(_END) if end else ():
            self._look_at(event.strip())
            if self._failure:
                break
            try:
                relayed.append(self._rewrite(event) + _END)
            except ReplyError as error:
                self._failure = self._failed(str(error))
                break
            if self._done:
                break
        return b"".join(relayed)

    def _look_at(self, event: bytes) -> None:
        """Parses an event only where it may hold an error or a usage."""
        if not event.startswith(b"data:"):
            return
        payload = event[5:].strip()
        if payload == b"[DONE]":
            self._done = True
            return
        if b'"error"' in payload or (b'"usage"' in payload and b'"usage":null' not in payload):
            chunk = self._parse(payload)
            failure = failure_of(chunk)
            if failure:
                self._failure = self._failed(failure)
                return
            self._usage_tokens = usage_of(chunk, "completion_tokens") or self._usage_tokens
        if b'"choices":[]' not in payload:
            self._chunks += 1

    def _parse(self, payload: bytes) -> dict[str, Any]:
        try:
            chunk = json.loads(payload)
        except ValueError as error:
            return {"error": f"an event is not JSON: {error}"}
        return chunk if isinstance(chunk, dict) else {}

    def _failed(self, detail: str, retryable: bool = False) -> LegError:
        return LegError(self._worker_id, detail, outcome=Outcome.WORKER_ERROR, retryable=retryable)


async def once(block: bytes) -> AsyncIterator[bytes]:
    """A stream that is complete already."""
    yield block
