"""Bodies so large that parsing them would hold up every stream: they are taken apart in a process of their own.

Python's JSON holds the interpreter's lock, so a thread would not help. What comes back is small: the fields of the
body without its prompt, and the prompt as JSON text, which both legs carry without anybody reading it again.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import structlog

from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import GatewayError, refused
from eldr.gateway.legs import Endpoint, prompt_prefix, read_body, split_obstacle

log = structlog.get_logger()

BIG_BODY_BYTES = 256 * 1024
"""Bodies from this size on are taken apart elsewhere: about 2 ms of parsing."""

_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A checked body. `body` lacks the fields in `raw`, whose values are JSON text.

    `ordinary` is the field for which two legs cannot serve it, empty where they can.
    """

    body: dict[str, Any]
    prefix: bytes
    ordinary: str = ""
    raw: Mapping[str, bytes] = field(default_factory=dict)


def encoded(body: Mapping[str, Any], raw: Mapping[str, bytes]) -> bytes:
    """The body of a leg as JSON. A field that `body` sets itself wins over the one in `raw`."""
    out = json.dumps(body).encode()
    for name, value in raw.items():
        if name not in body:
            out = b'%s%s"%s": %s}' % (out[:-1], b", " if body else b"", name.encode(), value)
    return out


class BodyParser:
    """Parses bodies; the process for large ones starts with the first of them. `close` ends it."""

    def __init__(self, counts: Counts, ordinary: bool = False, big_body_bytes: int = BIG_BODY_BYTES) -> None:
        self._counts = counts
        self._ordinary = ordinary
        self._big_body_bytes = big_body_bytes
        self._pool: ProcessPoolExecutor | None = None

    async def parse(self, endpoint: Endpoint, raw: bytes) -> Parsed:
        """Raises GatewayError 400, on what two legs cannot serve too unless `ordinary` is set."""
        if len(raw) < self._big_body_bytes:
            return parsed(endpoint, raw, self._ordinary)
        self._counts[Event.BODY_BIG] += 1
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._started(), taken_apart, endpoint, raw, self._ordinary)
        except BrokenProcessPool as error:
            log.warning("body_parser_died", error=str(error))
            self.close()
            raise GatewayError(503, "the body could not be parsed, try again", retry_after_s=1) from error
        if isinstance(answer, Parsed):
            return answer
        status, message, param = answer
        raise GatewayError(status, message, param=param)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=live_with_parent)
        return self._pool

    def close(self) -> None:
        """Ends the process; the next large body starts another."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def live_with_parent() -> None:
    """For the other process: signals are the parent's to handle, and where it is killed this one ends too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def parsed(endpoint: Endpoint, raw: bytes, ordinary: bool) -> Parsed:
    """A body as it is. Raises GatewayError 400."""
    body = read_body(raw)
    obstacle = split_obstacle(endpoint, body)
    if obstacle is not None and not ordinary:
        raise refused(*obstacle)
    return Parsed(body, prompt_prefix(endpoint, body), obstacle[0] if obstacle else "")


def taken_apart(endpoint: Endpoint, raw: bytes, ordinary: bool) -> "Parsed | tuple[int, str, str | None]":
    """For the other process: a body without its prompt, or what GatewayError it is refused with."""
    try:
        whole = parsed(endpoint, raw, ordinary)
    except GatewayError as error:
        return error.status, error.message, error.param
    big = {name: json.dumps(whole.body.pop(name)).encode() for name in _PROMPTS if name in whole.body}
    return Parsed(whole.body, whole.prefix, whole.ordinary, big)
