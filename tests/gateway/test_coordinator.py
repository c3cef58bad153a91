"""Requests through both legs: what the client sees, what the workers see, what is given back."""

import asyncio
import json

import pytest
from gateway_fleet import streamed_text, text_of

from eldr.client import Outcome
from eldr.gateway.counters import Event
from eldr.rpc.codec import CodecError
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "seed": 7, "temperature": 0.8}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "say it"}], "max_tokens": 4, "seed": 3}
CHAT_PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def test_a_completion_equals_that_of_one_ordinary_engine(fleet):
    status, reply = await fleet.complete(BODY)
    assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.transfers.ended == {"pulled": 1}
    assert fleet.router.released == [("decode", Outcome.COMPLETED, 5)]


async def test_a_stream_equals_that_of_one_ordinary_engine_and_ends_with_done(fleet):
    status, events = await fleet.stream({**CHAT, "stream_options": {"include_usage": True}}, CHAT_PATH)
    assert status == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 4
    assert streamed_text(events) == await fleet.text_of_plain(CHAT, CHAT_PATH)
    await fleet.settled()
    assert fleet.router.released == [("decode", Outcome.COMPLETED, 4)]


async def test_the_bytes_of_a_stream_are_those_of_the_decoder(fleet):
    async with fleet.post("/v1/completions", {**BODY, "stream": True}) as response:
        relayed = await response.read()
    sent_id = fleet.prefills[0].requests[0].headers["X-Request-Id"]
    decode = next(engine for engine in fleet.decodes if engine.requests)
    decode_id = decode.requests[0].headers["X-Request-Id"]
    async with fleet.http.post(
        fleet.plain.url + "/v1/completions", json={**BODY, "stream": True}
    ) as response:
        plain = await response.read()
    assert sent_id != decode_id
    assert relayed.replace(decode_id.encode(), b"plain-0") == plain


async def test_the_answer_names_the_workers_and_the_policy(fleet):
    async with fleet.post("/v1/completions", BODY) as response:
        headers = response.headers
    assert headers["x-eldr-prefill"] == "p0"
    assert headers["x-eldr-decode"] in ("d0", "d1")
    assert headers["x-eldr-policy"] == "round-robin"
    assert headers["x-request-id"].startswith("eldr-")


async def test_the_router_is_asked_with_what_the_prefill_leg_gave(fleet):
    fleet.prefills[0].signature = lambda rendered: "c2lnbmF0dXJl"
    await fleet.complete(BODY, headers={"x-eldr-domain": "law"})
    query = fleet.router.decode_queries[0]
    assert query["signature"] == "c2lnbmF0dXJl"
    assert (query["prompt_tokens"], query["max_tokens"], query["domain"]) == (3, 5, "law")
    assert fleet.router.prefixes == [b"one two three"]
    decode = next(iter(fleet.sent_to(fleet.decodes)))
    assert decode["kv_transfer_params"]["eldr_reservation_id"] == query["reservation_id"]
    assert "eldr_signature" not in decode["kv_transfer_params"]


async def test_a_signature_in_the_decode_reply_is_never_used(fleet):
    """Case 1.15: prompt rows come from the prefill reply alone."""
    for engine in fleet.decodes:
        engine.signature = lambda rendered: "anVuaw=="
    fleet.prefills[0].signature = lambda rendered: None
    await fleet.complete(BODY)
    assert [query["signature"] for query in fleet.router.decode_queries] == [None]
    assert fleet.counts[Event.NO_SIGNATURE] == 1


async def test_a_prefill_worker_that_holds_nothing_is_routed_by_its_signature_and_never_released(fleet):
    """Shared storage or offloading: the decoder finds the KV there, or computes the prompt itself."""
    fleet.prefills[0]._hold = lambda made: {"eldr_signature": "c2lnbmF0dXJl"}
    status, reply = await fleet.complete(BODY)
    assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    assert fleet.router.decode_queries[0]["signature"] == "c2lnbmF0dXJl"
    decode = next(iter(fleet.sent_to(fleet.decodes)))
    assert list(decode["kv_transfer_params"]) == ["eldr_reservation_id"]
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.counts[Event.NO_TRANSFER] == 1
    assert fleet.counts[Event.TRANSFER_RELEASED] == fleet.counts[Event.RELEASE_FAILED] == 0


async def test_a_signature_that_is_none_is_a_counted_fallback(fleet):
    fleet.prefills[0].signature = lambda rendered: "not base64!"
    real = fleet.router.reserve_decode

    async def strict(**query):
        if query["signature"] is not None:
            raise CodecError("signature: not base64 of a signature message")
        return await real(**query)

    fleet.router.reserve_decode = strict
    status, _ = await fleet.complete(BODY)
    assert status == 200
    assert fleet.counts[Event.BAD_SIGNATURE] == 1


async def test_a_refused_prefill_leg_is_the_clients_answer_and_no_decoder_is_asked(fleet):
    """Cases 2.7 and 2.9: the worker's status and body, at once, after exactly one call."""
    fleet.prefills[0].fault = Fault(FaultKind.STATUS, status=400, message="This prompt is too long.")
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.HANG)
    async with asyncio.timeout(2):
        status, reply = await fleet.complete(BODY)
    assert status == 400
    assert reply["error"]["message"] == "This prompt is too long."
    assert len(fleet.sent_to(fleet.prefills)) == 1
    assert fleet.sent_to(fleet.decodes) == []
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.router.released == [("prefill", Outcome.CLIENT_ERROR, 0)]


async def test_a_refused_decode_leg_frees_the_prompts_kv_at_once(fleet):
    """Case 2.2, with a decoder that does not tell the prefill worker itself."""
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.STATUS, status=400, message="unknown model")
        engine.frees_refused = False
    status, reply = await fleet.complete(BODY)
    assert (status, reply["error"]["message"]) == (400, "unknown model")
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.released_at == [("grpc-of-p0", "i1")]
    assert len(fleet.sent_to(fleet.decodes)) == 1
    assert fleet.router.released == [("decode", Outcome.CLIENT_ERROR, 0)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_that_only_the_decoder_sees_is_a_400_in_a_stream_too(make_fleet, stream):
    """Case 2.10: limit 20, prompt of 18 tokens, max_tokens 5; prompt + 1 fits."""
    fleet = await make_fleet()
    for engine in (*fleet.prefills, *fleet.decodes):
        engine.max_model_len = 20
    async with fleet.post(
        "/v1/completions", {"prompt": " ".join("x" * 18), "max_tokens": 5, "stream": stream}
    ) as response:
        reply = await response.json()
    assert response.status == 400
    assert "maximum context length" in reply["error"]["message"]
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_min_tokens_is_no_obstacle(fleet):
    """Case 2.11."""
    status, _ = await fleet.complete({**BODY, "min_tokens": 3, "max_tokens": 8})
    assert status == 200
    assert fleet.sent_to(fleet.decodes)[0]["min_tokens"] == 3


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_completion_tokens": 6}])
async def test_an_absent_max_tokens_is_served(fleet, fields):
    """Case 2.12."""
    body = {"model": "fake", "messages": CHAT["messages"], **fields}
    status, reply = await fleet.complete(body, CHAT_PATH)
    assert status == 200
    assert reply["usage"]["completion_tokens"] == fields.get("max_completion_tokens", 16)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_forced_tool_call_survives_the_one_token_leg(fleet, choice):
    """Case 2.14."""
    status, _ = await fleet.complete({**CHAT, "tools": TOOLS, "tool_choice": choice}, CHAT_PATH)
    assert status == 200
    assert fleet.sent_to(fleet.decodes)[0]["tool_choice"] == choice


async def test_the_prompt_is_the_same_in_both_legs_and_in_one_ordinary_engine(fleet):
    """Case 2.32."""
    body = {**CHAT, "tools": TOOLS, "made_up": {"a": 1}}
    await fleet.complete(body, CHAT_PATH)
    await fleet.text_of_plain(body, CHAT_PATH)
    seen = [
        request for engine in (*fleet.prefills, *fleet.decodes, fleet.plain) for request in engine.requests
    ]
    assert len(seen) == 3
    assert len({request.rendered for request in seen}) == 1
    assert all(request.body["made_up"] == {"a": 1} for request in seen)


async def test_two_requests_with_one_client_id_get_their_own_text(fleet):
    """Case 2.15."""
    bodies = [{**BODY, "prompt": f"prompt {index}", "request_id": "same"} for index in range(2)]
    answers = await asyncio.gather(
        *(fleet.complete(body, headers={"X-Request-Id": "same"}) for body in bodies)
    )
    for body, (status, reply) in zip(bodies, answers, strict=True):
        assert (status, text_of(reply)) == (200, await fleet.text_of_plain(body))
    sent = [
        request.headers["X-Request-Id"]
        for engine in (*fleet.prefills, *fleet.decodes)
        for request in engine.requests
    ]
    assert len(set(sent)) == 4
    assert "same" not in sent


async def test_the_clients_request_id_is_echoed(fleet):
    for body in (BODY, {**BODY, "n": 2}):
        async with fleet.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"}) as response:
            assert response.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("fields", [{"prompt": ["a", "b"]}, {"n": 2}, {"echo": True}, {"prompt_logprobs": 1}])
async def test_what_would_break_a_decoder_is_refused_before_any_worker_is_asked(fleet, fields):
    """Cases 2.22 and 2.25."""
    status, reply = await fleet.complete({**BODY, **fields})
    assert status == 400
    assert reply["error"]["param"] == next(iter(fields))
    assert fleet.sent_to(fleet.prefills) == []
    assert fleet.counts[Event.REQUEST_REFUSED] == 1


async def test_headers_that_concern_the_engine_reach_both_legs(fleet):
    await fleet.complete(BODY, headers={"Authorization": "Bearer k", "X-data-parallel-rank": "3"})
    for engine in (*fleet.prefills, *fleet.decodes):
        for request in engine.requests:
            assert request.headers["Authorization"] == "Bearer k"
            assert "X-data-parallel-rank" not in request.headers


async def test_nothing_is_left_after_many_requests_at_once(make_fleet):
    fleet = await make_fleet(prefills=2, decodes=3)
    bodies = [{**BODY, "prompt": f"prompt {index}", "seed": index} for index in range(60)]
    answers = await asyncio.gather(*map(fleet.complete, bodies))
    for body, (status, reply) in zip(bodies, answers, strict=True):
        assert (status, text_of(reply)) == (200, await fleet.text_of_plain(body))
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.transfers.stale_pulls == 0
