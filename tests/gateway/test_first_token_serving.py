"""Requests whose first token comes from prefill: what the client sees, and what is given back."""

import asyncio
import json

import pytest
from gateway_fleet import streamed_text, text_of

from eldr.client import Outcome
from eldr.gateway.counters import Event
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "temperature": 0}
USAGE = {"stream_options": {"include_usage": True}}
COUNTED = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


@pytest.fixture
async def eager(make_fleet):
    """A fleet whose gateway sends the first token from prefill; decode legs are made in another second."""
    fleet = await make_fleet(first_token_from_prefill=True)
    for engine in fleet.decodes:
        engine.created = 2
    return fleet


def all_engines(fleet):
    return (*fleet.prefills, *fleet.decodes, fleet.plain)


async def plain_answer(fleet, body):
    async with fleet.http.post(fleet.plain.url + "/v1/completions", json=body) as response:
        return await response.json()


async def plain_events(fleet, body):
    async with fleet.http.post(
        fleet.plain.url + "/v1/completions", json={**body, "stream": True}
    ) as response:
        return [event[6:] for event in (await response.text()).split("\n\n") if event]


def without_id(value):
    return {name: part for name, part in value.items() if name not in ("id", "created")}


async def test_the_mode_is_off_unless_asked_for(fleet):
    await fleet.complete(BODY)
    (prefill,) = fleet.sent_to(fleet.prefills)
    assert "return_token_ids" not in prefill
    assert fleet.sent_to(fleet.decodes)[0]["prompt"] == BODY["prompt"]
    assert fleet.counts == {Event.NO_SIGNATURE: 1}


@pytest.mark.parametrize(
    "more", [{}, {"return_token_ids": True}, {"seed": 3}, {"min_tokens": 4}, {"max_tokens": None}]
)
async def test_a_completion_equals_that_of_one_ordinary_engine(eager, more):
    body = {**BODY, **more}
    status, reply = await eager.complete(body)
    assert (status, without_id(reply)) == (200, without_id(await plain_answer(eager, body)))
    await eager.settled()
    assert eager.nothing_is_held()
    assert eager.transfers.ended == {"pulled": 1}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_token_ids": True},
        USAGE,
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
async def test_a_stream_equals_that_of_one_ordinary_engine_under_one_id(eager, more):
    body = {**BODY, **more}
    status, events = await eager.stream(body)
    expected = await plain_events(eager, body)
    assert status == 200
    assert events.pop() == expected.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert [without_id(chunk) for chunk in chunks] == [without_id(json.loads(event)) for event in expected]
    prefill_id = eager.prefills[0].requests[0].headers["X-Request-Id"]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {(f"cmpl-{prefill_id}", 1)}
    await eager.settled()
    assert eager.nothing_is_held()
    assert eager.router.released == [("decode", Outcome.COMPLETED, 4)]


async def test_the_first_token_is_there_before_a_decoder_is_chosen(eager):
    eager.router.gates["reserve_decode"] = asyncio.Event()
    async with eager.post("/v1/completions", {**BODY, "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        assert response.headers["x-eldr-prefill"] == "p0"
        assert "x-eldr-decode" not in response.headers
        assert eager.sent_to(eager.decodes) == []
        eager.router.gates["reserve_decode"].set()
        rest = await response.read()
    events = [event[6:] for event in (first + rest).decode().split("\n\n") if event]
    assert streamed_text(events) == await eager.text_of_plain(BODY)
    assert eager.counts[Event.FIRST_TOKEN_SENT] == 1


async def test_the_decode_leg_continues_the_exact_history(eager):
    await eager.complete({**BODY, "min_tokens": 2})
    (prefill,), (decode,) = eager.sent_to(eager.prefills), eager.sent_to(eager.decodes)
    known = eager.transfers.prompt_of(decode["prompt"])
    assert known is not None
    assert (known[0], len(known[1])) == ("one two three", 1)
    assert (prefill["max_tokens"], prefill["min_tokens"]) == (1, 1)
    assert (decode["max_tokens"], decode["min_tokens"]) == (4, 1)
    assert decode["kv_transfer_params"]["remote_num_tokens"] == 3
    query = eager.router.decode_queries[0]
    assert (query["prompt_tokens"], query["max_tokens"]) == (3, 4)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("stops_at", "limit"), [(0, 5), (None, 1)])
async def test_an_answer_of_one_token_needs_no_decoder_and_releases_the_transfer(
    eager, streams, stops_at, limit
):
    for engine in all_engines(eager):
        engine.stops_at = stops_at
    body = {**BODY, "max_tokens": limit}
    if streams:
        _, events = await eager.stream({**body, **USAGE})
        expected = await plain_events(eager, {**body, **USAGE})
        assert events.pop() == expected.pop() == "[DONE]"
        mine, theirs = ([without_id(json.loads(event)) for event in part] for part in (events, expected))
        assert mine == theirs
    else:
        _, reply = await eager.complete(body)
        assert without_id(reply) == without_id(await plain_answer(eager, body))
    await eager.settled()
    assert eager.sent_to(eager.decodes) == []
    assert eager.nothing_is_held()
    assert eager.transfers.ended == {"released": 1}
    assert eager.router.released == [("prefill", Outcome.COMPLETED, 0)]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_end_token_within_min_tokens_does_not_end_the_answer_at_prefill(eager, streams):
    for engine in all_engines(eager):
        engine.stops_at = 2
    body = {**BODY, "min_tokens": 2}
    if streams:
        _, events = await eager.stream(body)
        assert streamed_text(events) == await eager.text_of_plain(body)
    else:
        _, reply = await eager.complete(body)
        assert without_id(reply) == without_id(await plain_answer(eager, body))
        assert reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", ["", "\ufffd"])
async def test_a_first_token_that_is_no_whole_character_is_left_to_the_decoder(eager, text):
    for engine in all_engines(eager):
        engine.texts[0] = text
    _, reply = await eager.complete(BODY)
    assert text_of(reply) == await eager.text_of_plain(BODY)
    assert eager.sent_to(eager.decodes)[0]["prompt"] == BODY["prompt"]
    assert eager.counts == {Event.FIRST_TOKEN_TEXT: 1, Event.NO_SIGNATURE: 1}


async def test_kv_that_does_not_cover_exactly_the_prompt_is_left_to_the_decoder(eager):
    real = eager.prefills[0]._hold
    eager.prefills[0]._hold = lambda made: {**real(made), "remote_num_tokens": 2}
    _, reply = await eager.complete(BODY)
    assert text_of(reply) == await eager.text_of_plain(BODY)
    assert eager.counts[Event.FIRST_TOKEN_COVERAGE] == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"temperature": 0.8, "seed": 7}, Event.FIRST_TOKEN_SAMPLED),
        ({"presence_penalty": 0.5}, Event.FIRST_TOKEN_PENALTY),
        ({"stop": "x"}, Event.FIRST_TOKEN_STOP),
    ],
)
async def test_a_request_that_is_not_eligible_is_served_as_ever_and_counted(eager, more, reason):
    body = {**BODY, **more}
    _, events = await eager.stream(body)
    assert streamed_text(events) == await eager.text_of_plain(body)
    assert eager.sent_to(eager.decodes)[0]["prompt"] == BODY["prompt"]
    assert eager.counts == {reason: 1, Event.NO_SIGNATURE: 1}


@pytest.mark.parametrize("streams", [False, True])
async def test_when_every_decoder_fails_the_answer_is_an_error(eager, streams):
    for engine in eager.decodes:
        engine.fault = Fault(FaultKind.STATUS, status=503)
    if streams:
        _, (first, failure) = await eager.stream(BODY)
        assert (await eager.text_of_plain(BODY)).startswith(streamed_text([first]))
        assert json.loads(failure)["error"]["code"] == 503
    else:
        status, _ = await eager.complete(BODY)
        assert status == 503
    await eager.settled()
    assert eager.nothing_is_held()


@pytest.mark.parametrize("streams", [False, True])
async def test_one_failed_decoder_changes_no_token(eager, streams):
    """The second prefill leg computes the prompt and the token that was sent; its own token is thrown away."""
    eager.decodes[0].fault = Fault(FaultKind.RESET)
    eager.router._turns["decode"] = iter(range(0, 100, 2))
    if streams:
        _, events = await eager.stream({**BODY, **USAGE})
        assert streamed_text(events) == await eager.text_of_plain(BODY)
        assert json.loads(events[-2])["usage"] == COUNTED
    else:
        _, reply = await eager.complete(BODY)
        assert text_of(reply) == await eager.text_of_plain(BODY)
        assert reply["usage"] == COUNTED
    again = eager.sent_to(eager.prefills)[1]
    assert len(again["prompt"]) == 4
    assert "return_token_ids" not in again
    assert eager.counts[Event.FIRST_TOKEN_SENT] == 1
    assert eager.counts[Event.DECODE_RETRIED] == 1
    await eager.settled()
    assert eager.nothing_is_held()


async def test_a_refusal_after_the_first_token_is_an_error_event_with_its_status(eager):
    for engine in eager.decodes:
        engine.fault = Fault(FaultKind.STATUS, status=400, message="too long")
    status, events = await eager.stream(BODY)
    assert status == 200
    assert len(events) == 2
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["message"]) == (400, "too long")
    assert eager.counts[Event.STREAM_FAILED] == 1
    await eager.settled()
    assert eager.nothing_is_held()


async def test_no_decoder_after_the_first_token_is_an_error_event(eager):
    eager.router.engines["decode"] = []
    _, events = await eager.stream(BODY)
    assert json.loads(events[-1])["error"]["code"] == 503
    await eager.settled()
    assert eager.nothing_is_held()


async def test_a_client_that_leaves_after_the_first_token_leaves_nothing_behind(eager):
    eager.router.gates["reserve_decode"] = asyncio.Event()
    async with eager.post("/v1/completions", {**BODY, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
    eager.router.gates["reserve_decode"].set()
    await eager.until(lambda: eager.counts[Event.CLIENT_GONE] == 1)
    await eager.until(eager.nothing_is_held)


async def test_a_decoder_that_does_not_stream_ends_a_begun_stream_with_an_error_event(eager):
    for engine in eager.decodes:
        engine._stream = lambda request, made, engine=engine: engine._json(request, made, prefill=False)
    _, events = await eager.stream(BODY)
    assert json.loads(events[-1])["error"]["code"] == 502
    await eager.settled()
    assert eager.nothing_is_held()
