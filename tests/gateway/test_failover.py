"""Workers that fail, and what the client and the next worker get."""

import asyncio
import json
from collections import Counter

import grpc
import pytest
from gateway_fleet import events_of, streamed_text, text_of

from eldr.client import NoWorkerError, Outcome, RouterError, RouterUnreachableError
from eldr.gateway.counters import Event
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "seed": 7}


def only(fleet, outcome: Outcome) -> bool:
    return [released[1] for released in fleet.router.released] == [outcome]


async def test_an_unreachable_decoder_leaves_the_hand_off_to_the_next_one(fleet):
    """The request never reached it, so the KV is untouched: one prefill leg serves both."""
    await fleet.decodes[0].stop()
    for _ in range(2):
        status, reply = await fleet.complete(BODY)
        assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    assert len(fleet.sent_to(fleet.prefills)) == 2
    await fleet.settled()
    assert fleet.counts[Event.DECODE_RETRIED] >= 1
    assert fleet.nothing_is_held()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.RESET),
        Fault(FaultKind.STATUS, status=502),
        Fault(FaultKind.STATUS, status=503),
        Fault(FaultKind.STATUS, status=504),
        Fault(FaultKind.STATUS, status=429),
        Fault(FaultKind.CUT),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_decoder_that_fails_before_its_first_byte_is_replaced_with_a_new_hand_off(
    make_fleet, fault, stream
):
    """Cases 2.9 and 2.30. The one that was reached may have freed the KV, as vLLM does when it refuses."""
    fleet = await make_fleet()
    for engine in fleet.decodes:
        engine.faults.append(fault)
    fleet.decodes[1].faults.clear()
    for _ in range(2):
        if stream:
            status, events = await fleet.stream(BODY)
            text = streamed_text(events)
        else:
            status, reply = await fleet.complete(BODY)
            text = text_of(reply)
        assert (status, text) == (200, await fleet.text_of_plain(BODY))
    await fleet.settled()
    assert fleet.transfers.stale_pulls == 0
    assert fleet.nothing_is_held()
    assert fleet.counts[Event.DECODE_RETRIED] == 1
    assert len(fleet.sent_to(fleet.prefills)) == 3


async def test_decoders_that_all_refuse_the_connection_end_in_a_502_that_names_one(fleet):
    for engine in fleet.decodes:
        await engine.stop()
    status, reply = await fleet.complete(BODY)
    assert (status, reply["error"]["code"]) == (502, 502)
    assert "worker d" in reply["error"]["message"]
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.transfers.ended == {"released": 1}


async def test_decoders_that_are_all_full_end_in_a_503_with_retry_after(fleet):
    """Full is neither dead nor an error of ours (case 3.13)."""
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.STATUS, status=503)
    async with fleet.post("/v1/completions", BODY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
    await fleet.settled()
    assert {outcome for leg, outcome, _ in fleet.router.released if leg == "decode"} == {Outcome.BACKPRESSURE}
    assert fleet.nothing_is_held()


@pytest.mark.parametrize("kind", [FaultKind.ERROR_PAYLOAD, FaultKind.ERROR_FINISH, FaultKind.STATUS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_generation_before_the_first_token_is_a_502(make_fleet, kind, stream):
    """Case 2.18: an HTTP 200 that is none, and vLLM's own 500; deterministic, so not tried again."""
    fleet = await make_fleet()
    for engine in fleet.decodes:
        engine.fault = Fault(kind)
    async with fleet.post("/v1/completions", {**BODY, "stream": stream}) as response:
        reply = await response.json()
    assert response.status == 502
    assert reply["error"]["message"].startswith("worker d")
    assert len(fleet.sent_to(fleet.decodes)) == 1
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert only(fleet, Outcome.WORKER_ERROR)


@pytest.mark.parametrize("kind", [FaultKind.ERROR_PAYLOAD, FaultKind.ERROR_FINISH, FaultKind.CUT])
async def test_a_stream_that_fails_ends_with_an_error_event_and_no_done(fleet, kind):
    """Case 2.18."""
    for engine in fleet.decodes:
        engine.fault = Fault(kind, after_tokens=2)
    pause = fleet.pause(fleet.decodes, "token")
    async with fleet.post("/v1/completions", {**BODY, "stream": True}) as response:
        assert response.status == 200
        first = await response.content.readany()
        pause.go_on()
        events = events_of(first + await response.read())
    assert len(events) == 3
    assert json.loads(events[-1])["error"]["code"] == 502
    await fleet.settled()
    assert fleet.router.released == [("decode", Outcome.WORKER_ERROR, 2)]
    assert fleet.counts[Event.STREAM_FAILED] == 1


async def test_a_decoder_that_dies_in_a_stream_ends_it_with_an_error_event(fleet):
    fleet.pause(fleet.decodes, "token")
    async with fleet.post("/v1/completions", {**BODY, "stream": True}) as response:
        first = await response.content.readany()
        for engine in fleet.decodes:
            await engine.stop()
        events = events_of(first + await response.read())
    assert len(events) == 2
    assert "error" in json.loads(events[-1])


async def test_a_silent_stream_ends_with_a_timeout(make_fleet):
    fleet = await make_fleet(idle_timeout_s=0.05)
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.STALL, after_tokens=1)
    _, events = await fleet.stream(BODY)
    assert json.loads(events[-1])["error"]["code"] == 504
    await fleet.settled()
    assert only(fleet, Outcome.TIMEOUT)
    await fleet.until(lambda: sum(engine.aborted for engine in fleet.decodes) == 1)


@pytest.mark.parametrize(
    ("stream", "limit"),
    [(True, "first_token_timeout_s"), (False, "decode_timeout_s"), (False, "prefill_timeout_s")],
)
async def test_each_leg_has_a_time_limit_of_its_own(make_fleet, stream, limit):
    fleet = await make_fleet(**{limit: 0.05})
    for engine in fleet.prefills if limit == "prefill_timeout_s" else fleet.decodes:
        engine.fault = Fault(FaultKind.HANG)
    async with fleet.post("/v1/completions", {**BODY, "stream": stream}) as response:
        reply = await response.json()
    assert response.status == 504
    assert "took longer than 0.05 s" in reply["error"]["message"]
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert only(fleet, Outcome.TIMEOUT)


async def test_a_hung_decoder_does_not_hold_up_the_others(make_fleet):
    """Case 3.14: 50 requests over 3 decoders, one of which is silent and holds its 10 connections, no more."""
    fleet = await make_fleet(decodes=3, connections_per_worker=10, connect_timeout_s=60.0)
    fleet.decodes[0].fault = Fault(FaultKind.HANG)
    clients = [asyncio.create_task(fleet.complete({**BODY, "seed": index})) for index in range(50)]
    await fleet.until(lambda: len(fleet.router.decode_queries) == 50)
    await fleet.until(lambda: sum(client.done() for client in clients) == 33)
    assert len(fleet.decodes[0].requests) == 10
    await fleet.decodes[0].stop()
    assert Counter(status for status, _ in await asyncio.gather(*clients)) == {200: 50}
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_requests_that_wait_for_a_connection_to_a_full_worker_go_elsewhere(make_fleet):
    """Case 3.14."""
    fleet = await make_fleet(decodes=2, connections_per_worker=1, connect_timeout_s=0.5)
    fleet.decodes[0].fault = Fault(FaultKind.HANG)
    silent = asyncio.create_task(fleet.complete(BODY))
    await fleet.until(lambda: len(fleet.decodes[0].requests) == 1)
    for _ in range(4):
        assert (await fleet.complete(BODY))[0] == 200
    assert not silent.done()
    assert len(fleet.decodes[0].requests) == 1
    silent.cancel()


async def test_a_prefill_worker_that_fails_is_replaced(make_fleet):
    for fault in (Fault(FaultKind.RESET), Fault(FaultKind.STATUS, status=503), Fault(FaultKind.CUT)):
        fleet = await make_fleet(prefills=2)
        fleet.prefills[0].faults.append(fault)
        for _ in range(2):
            status, reply = await fleet.complete(BODY)
            assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
        assert fleet.counts[Event.PREFILL_RETRIED] == 1
        await fleet.settled()
        assert fleet.nothing_is_held()


async def test_a_prefill_reply_without_a_hand_off_is_a_502_and_no_decode_only_run(fleet):
    """Case 2.20: the prompt is never computed on a decoder without anybody's notice."""
    fleet.prefills[0].fault = Fault(FaultKind.NO_HANDOFF)
    status, reply = await fleet.complete(BODY)
    assert status == 502
    assert "no hand-off" in reply["error"]["message"]
    assert fleet.sent_to(fleet.decodes) == []


async def test_a_prefill_leg_that_failed_with_http_200_is_a_502(fleet):
    fleet.prefills[0].fault = Fault(FaultKind.ERROR_PAYLOAD)
    assert (await fleet.complete(BODY))[0] == 502
    assert len(fleet.sent_to(fleet.prefills)) == 1


async def test_a_connection_that_the_worker_closed_while_idle_is_tried_once_more(make_fleet):
    fleet = await make_fleet(decodes=1, attempts=1)
    await fleet.complete(BODY)
    for engine in (*fleet.prefills, *fleet.decodes):
        engine.faults.append(Fault(FaultKind.RESET))
    status, reply = await fleet.complete(BODY)
    assert (status, text_of(reply)) == (200, await fleet.text_of_plain(BODY))
    assert fleet.counts[Event.CONNECTION_RETRIED] == 2


async def test_an_old_hand_off_is_made_anew(make_fleet):
    """The KV lease is 30 s: a decoder is never sent to a hand-off near its end."""
    fleet = await make_fleet(handoff_timeout_s=0.05)
    await fleet.decodes[0].stop()
    slow = fleet.router.reserve_decode

    async def slowly(**query):
        await asyncio.sleep(0.06)
        return await slow(**query)

    fleet.router.reserve_decode = slowly
    await asyncio.gather(*(fleet.complete({**BODY, "seed": index}) for index in range(4)))
    await fleet.settled()
    assert fleet.counts[Event.HANDOFF_STALE] >= 1
    assert fleet.transfers.stale_pulls == 0
    assert fleet.nothing_is_held()


async def test_no_worker_is_a_503_with_the_routers_reason(fleet):
    fleet.router.error = NoWorkerError(grpc.StatusCode.UNAVAILABLE, "3 decoders: all draining")
    async with fleet.post("/v1/completions", BODY) as response:
        reply = await response.json()
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"
    assert "3 decoders: all draining" in reply["error"]["message"]


async def test_an_unreachable_router_is_a_503(fleet):
    fleet.router.error = RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "connection refused")
    status, reply = await fleet.complete(BODY)
    assert status == 503
    assert "router" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.NOT_FOUND, 404),
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 503),
    ],
)
async def test_a_refusal_of_the_router_has_the_status_that_fits(fleet, code, status):
    fleet.router.error = RouterError(code, "model 'x' is not served; served: fake")
    given, reply = await fleet.complete(BODY)
    assert given == status
    assert "model 'x' is not served" in reply["error"]["message"]


async def test_a_router_that_leaves_between_the_legs_costs_neither_booking_nor_kv(fleet):
    real = fleet.router.reserve_decode

    async def gone(**query):
        raise RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "connection refused")

    fleet.router.reserve_decode = gone
    assert (await fleet.complete(BODY))[0] == 503
    fleet.router.reserve_decode = real
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.transfers.ended == {"released": 1}
