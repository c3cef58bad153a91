"""The relay of server-sent events."""

import contextlib
import json

import aiohttp
import pytest

from eldr.gateway.errors import LegError
from eldr.gateway.legs import ReplyError
from eldr.gateway.stream import EventRelay
from eldr.rpc.outcome import Outcome

DONE = b"data: [DONE]\n\n"


class Content:
    """Stands in for aiohttp's StreamReader: gives the pieces one by one, then ends or fails."""

    def __init__(self, *pieces: bytes, failure: Exception | None = None) -> None:
        self._pieces = list(pieces)
        self._failure = failure

    async def readany(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._failure:
            raise self._failure
        return b""


def event(text: str, **fields) -> bytes:
    chunk = {"choices": [{"text": text, "finish_reason": None}], "usage": None, **fields}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def relayed(content: Content, rewrite=bytes) -> tuple[bytes, EventRelay, LegError | None]:
    relay = EventRelay("d0", content, contextlib.nullcontext, rewrite)
    out = b""
    try:
        await relay.open()
        async for block in relay.blocks():
            out += block
    except LegError as error:
        return out, relay, error
    return out, relay, None


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_the_bytes_do_not_depend_on_how_they_arrive(size):
    stream = event("a") + b": keep-alive\n\n" + event('say "error" and "usage"') + event("é") + DONE
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    out, relay, error = await relayed(Content(*pieces))
    assert (out, error, relay.output_tokens) == (stream, None, 3)


async def test_the_usage_of_the_stream_wins_over_the_number_of_chunks():
    usage = {"choices": [], "usage": {"completion_tokens": 9}}
    stream = event("a") + b"data: " + json.dumps(usage).encode() + b"\n\n" + DONE
    _, relay, error = await relayed(Content(stream))
    assert (relay.output_tokens, error) == (9, None)


async def test_a_comment_is_not_yet_a_first_event():
    content = Content(b": keep-alive\n\n", b'data: {"error": {"message": "too late"}}\n\n' + DONE)
    out, _, error = await relayed(content)
    assert out == b""
    assert error is not None
    assert str(error) == "worker d0: too late"
    assert not error.retryable


@pytest.mark.parametrize(
    "bad",
    [
        b'data: {"error":{"message":"engine failed"}}\n\n',
        b'data: {"choices":[{"text":"","finish_reason":"error"}]}\n\n',
        b'data: {"error": nonsense\n\n',
    ],
)
async def test_what_comes_before_a_failure_is_relayed_and_nothing_after_it(bad):
    out, _, error = await relayed(Content(event("a"), event("b") + bad + DONE))
    assert out == event("a") + event("b")
    assert error is not None
    assert error.outcome is Outcome.WORKER_ERROR


async def test_a_stream_without_done_has_failed():
    out, _, error = await relayed(Content(event("a"), event("b")))
    assert out == event("a") + event("b")
    assert error is not None
    assert "without [DONE]" in str(error)


async def test_a_broken_connection_has_failed_and_another_worker_may_do_better():
    _, _, error = await relayed(Content(failure=aiohttp.ClientPayloadError("cut")))
    assert error is not None
    assert error.retryable
    assert error.reached


async def test_what_follows_done_is_not_relayed():
    out, _, error = await relayed(Content(event("a"), DONE + event("b"), event("c")))
    assert (out, error) == (event("a") + DONE, None)


async def test_events_reach_the_client_as_they_are_rewritten():
    out, relay, error = await relayed(Content(event("a") + DONE), rewrite=bytes.upper)
    assert out == (event("a") + DONE).upper()
    assert (relay.output_tokens, error) == (1, None)


async def test_an_event_that_cannot_be_rewritten_ends_the_stream_after_those_before_it():
    def rewrite(data: bytes) -> bytes:
        if b'"b"' in data:
            raise ReplyError("no chunk")
        return data

    out, _, error = await relayed(Content(event("a"), event("b") + DONE), rewrite)
    assert out == event("a")
    assert str(error) == "worker d0: no chunk"
