"""Requests whose every end is known: the whole answer, an error, a broken connection, or nothing in time."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from eldr.demo.client import COMPLETIONS, Request
from eldr.demo.compare import TIE_LOGPROB, ReferenceOutput

MODEL = "m"


class End(StrEnum):
    """How a request ended for its client."""

    DONE = "done"
    ERROR = "error"
    CUT = "cut"


@dataclass
class Sent:
    """A request under way: what its client has got so far. `end` is None until it has ended."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    prefill: str = ""
    decode: str = ""
    end: End | None = None
    detail: str = ""
    seconds: float = 0.0

    @property
    def streams(self) -> bool:
        return bool(self.request.body.get("stream"))

    def wrong(self, expected: ReferenceOutput) -> str:
        """What is wrong with what the client got, empty for nothing: it must be, or begin, the ordinary answer."""
        if self.end is End.DONE and len(self.token_ids) != len(expected.token_ids):
            return f"{len(self.token_ids)} tokens instead of {len(expected.token_ids)}"
        for place, (mine, theirs) in enumerate(zip(self.token_ids, expected.token_ids, strict=False)):
            if mine != theirs:
                return "" if expected.gaps[place] <= TIE_LOGPROB else f"token {place} is {mine}, not {theirs}"
        return ""


def request(name: str, prompt: str, tokens: int, stream: bool) -> Request:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    return Request(name, "", body)


async def send(session: aiohttp.ClientSession, url: str, sent: Sent) -> None:
    """Runs one request to its end; the end is in `sent`, never an exception."""
    begin = time.monotonic()
    try:
        async with session.post(url + COMPLETIONS, json=sent.request.body) as response:
            sent.prefill = response.headers.get("x-eldr-prefill", "")
            sent.decode = response.headers.get("x-eldr-decode", "")
            if response.status != 200:
                sent.end, sent.detail = End.ERROR, f"HTTP {response.status}: {await response.text()}"
            elif sent.streams:
                await _read_events(response, sent)
            else:
                _read_answer(await response.json(), sent)
    except (aiohttp.ClientError, OSError) as error:
        sent.end, sent.detail = End.CUT, f"{type(error).__name__}: {error}"
    finally:
        sent.seconds = time.monotonic() - begin


def _read_answer(answer: Any, sent: Sent) -> None:
    sent.token_ids += answer["choices"][0]["token_ids"]
    sent.end = End.DONE


async def _read_events(response: aiohttp.ClientResponse, sent: Sent) -> None:
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            sent.end = End.DONE
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            sent.end, sent.detail = End.ERROR, str(event["error"])
            return
        for choice in event["choices"]:
            sent.token_ids += choice.get("token_ids") or ()
    sent.end, sent.detail = End.CUT, "the stream ended without [DONE]"


class Load:
    """Requests sent at the same time. Leaving the context ends those that are left."""

    def __init__(self, url: str, requests: Sequence[Request]) -> None:
        self._url = url
        self.sent = [Sent(request) for request in requests]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
        )
        self._tasks = [asyncio.create_task(send(self._session, self._url, sent)) for sent in self.sent]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def ended(self, within_s: float) -> bool:
        """Waits for all requests; False where some still have no end after `within_s`."""
        _, left = await asyncio.wait(self._tasks, timeout=within_s)
        return not left
