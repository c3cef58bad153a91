"""Anything in a request: an answer or a 4xx in OpenAI's form, never a 5xx, and nothing stays held."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateway_fleet import Fleet
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.gateway import transfers
from eldr.gateway.big_bodies import BIG_BODY_BYTES
from eldr.gateway.legs import Endpoint
from eldr.gateway.settings import GatewaySettings

GOOD: dict[str, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"model": "fake", "prompt": "one two three", "max_tokens": 3},
    Endpoint.CHAT: {"model": "fake", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 3},
}
FIELDS = [
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stream",
        "n",
        "stop",
    ),
    *("echo", "logprobs", "top_logprobs", "temperature", "seed", "tools", "tool_choice", "response_format"),
    *("stream_options", "prompt_logprobs", "prompt_embeds", "use_beam_search", "truncate_prompt_tokens"),
    *("kv_transfer_params", "request_id", "logit_bias", "user", "best_of", "suffix", "structured_outputs"),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**400, "1", "\ud800", "\x00", "\u2028"])
    | st.floats()
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "a", ""]), inner, max_size=4)
    ),
    max_leaves=10,
)
ENDPOINTS = st.sampled_from(sorted(GOOD))


class Served:
    """A fleet on a loop of its own, on which examples run one after the other."""

    def __init__(self, runner: asyncio.Runner, fleet: Fleet) -> None:
        self._runner = runner
        self.fleet = fleet

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
        """The status; an error has OpenAI's form."""
        status, reply = self._runner.run(self._post(path, body, headers or {}))
        if status >= 400:
            error = json.loads(reply)["error"]
            assert error["code"] == status
            assert isinstance(error["message"], str)
        return status

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        async with asyncio.timeout(20), self.fleet.post(path, body, headers=headers) as response:
            return response.status, await response.read()

    def send(self, raw: bytes) -> bytes:
        """What comes back on a connection on which these bytes are sent."""
        return self._runner.run(self._send(raw))

    async def _send(self, raw: bytes) -> bytes:
        host, _, port = self.fleet.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        writer.write_eof()
        try:
            async with asyncio.timeout(20):
                return await reader.read()
        finally:
            writer.close()

    def settled(self) -> bool:
        self._runner.run(self.fleet.settled())
        return self.fleet.nothing_is_held()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(transfers, "UNSEEN_DELAY_S", 0.01)
        fleet = Fleet(1, 2, GatewaySettings())
        runner.run(fleet.start())
        found = Served(runner, fleet)
        yield found
        assert found.post(Endpoint.COMPLETIONS, json.dumps(GOOD[Endpoint.COMPLETIONS]).encode()) == 200
        assert found.settled()
        runner.run(fleet.stop())


@given(endpoint=ENDPOINTS, body=st.binary(max_size=200))
def test_any_bytes(served: Served, endpoint: str, body: bytes) -> None:
    assert served.post(endpoint, body) < 500


@given(endpoint=ENDPOINTS, body=JSON)
def test_any_json(served: Served, endpoint: str, body: object) -> None:
    assert served.post(endpoint, json.dumps(body).encode()) < 500


@settings(max_examples=250)
@given(endpoint=ENDPOINTS, fields=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_a_good_request_with_any_fields_changed(served: Served, endpoint: str, fields: dict) -> None:
    assert served.post(endpoint, json.dumps(GOOD[endpoint] | fields).encode()) < 500
    assert served.settled()


@pytest.mark.parametrize("endpoint", sorted(GOOD))
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"max_tokens":' + b"9" * 5_000 + b"}",
        b'{"model":"a","model":"b"}',
        b'{"prompt":"\xff"}',
        b'\xef\xbb\xbf{"prompt":"a"}',
        b'"' + b"x" * (BIG_BODY_BYTES + 1) + b'"',
        b'{"prompt":"' + b"x" * (BIG_BODY_BYTES + 1),
        b'{"prompt":' + b"[" * (BIG_BODY_BYTES + 1),
        b'{"messages":[' + b"{}," * (BIG_BODY_BYTES // 3 + 1) + b"1]}",
        b"",
    ],
    ids=lambda body: repr(body[:14]),
)
def test_bodies_made_to_hurt(served: Served, endpoint: str, body: bytes) -> None:
    assert 200 <= served.post(endpoint, body) < 500


HEADER = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=300)


@given(
    headers=st.dictionaries(
        st.sampled_from(
            [
                "x-eldr-domain",
                "x-eldr-timeout",
                "X-Request-Id",
                "Authorization",
                "X-Session-ID",
                "traceparent",
            ]
        ),
        HEADER | st.sampled_from(["nan", "inf", "-1", "1e-300", "0", "1e400", "Bearer", "Bearer  "]),
    )
)
def test_any_headers(served: Served, headers: dict[str, str]) -> None:
    body = json.dumps(GOOD[Endpoint.COMPLETIONS]).encode()
    # A client may give its request no time at all; that is its own doing, and a timeout is what it asked for.
    statuses = {*range(200, 500), *({504} if "x-eldr-timeout" in headers else ())}
    assert served.post(Endpoint.COMPLETIONS, body, headers) in statuses
    assert served.settled()


@settings(max_examples=150)
@given(
    st.binary(max_size=100),
    st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"]),
)
def test_bytes_that_are_no_http(served: Served, raw: bytes, begin: bytes) -> None:
    reply = served.send(begin + raw)
    assert not reply.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5"))
