"""Sends a workload with a bounded number of requests in flight and times every token."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.demo.stream import StreamError, TokenStream

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Completion:
    """One timed request. `error` is "" where it ended well.

    Seconds since it was sent, at the first and the last of `token_ids`.
    """

    request_id: str
    domain: str
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, (t_last - t_first) / (tokens - 1)."""
        return (self.last_s - self.first_s) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Request:
    """What to send: the body of a completion, under a name and with a domain label."""

    request_id: str
    domain: str
    body: dict[str, Any]


async def send_all(
    url: str,
    requests: Sequence[Request],
    in_flight: int,
    timeout_s: float,
    done: Callable[[], None] = lambda: None,
) -> list[Completion]:
    """Streams every request from the OpenAI server at `url`; the answers keep the requests' order.

    A request that fails is an answer with an error, never an exception.
    """
    answers: list[Completion | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def work(session: aiohttp.ClientSession) -> None:
        for position, request in waiting:
            answers[position] = await _send(session, url, request)
            done()

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(min(in_flight, len(requests))):
            group.create_task(work(session))
    return [answer for answer in answers if answer is not None]


async def _send(session: aiohttp.ClientSession, url: str, request: Request) -> Completion:
    body = {**request.body, "stream": True}
    stream = TokenStream()
    sent_s = time.perf_counter()
    try:
        async with session.post(
            url + COMPLETIONS, json=body, headers={"x-eldr-domain": request.domain}
        ) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                return Completion(request.request_id, request.domain, error=f"HTTP {response.status}: {text}")
            async for line in response.content:
                stream.feed(line, time.perf_counter())
    except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as error:
        return Completion(request.request_id, request.domain, error=str(error) or type(error).__name__)
    return Completion(
        request.request_id,
        request.domain,
        stream.prompt_token_ids,
        tuple(stream.token_ids),
        stream.first_s - sent_s,
        stream.last_s - sent_s,
        _flaw(stream, request.body["max_tokens"]),
    )


def _flaw(stream: TokenStream, wanted: int) -> str:
    if not stream.ended:
        return "the stream ended without [DONE]"
    if len(stream.token_ids) != wanted:
        return f"{len(stream.token_ids)} tokens came, {wanted} were asked for"
    return ""
