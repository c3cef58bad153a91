"""Routes, limits, readiness, and the end of the process."""

import asyncio
import json

import grpc
import pytest

from eldr.client import RouterUnreachableError
from eldr.gateway.counters import Event
from eldr.gateway.settings import GatewaySettings

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}


async def get(fleet, path: str) -> tuple[int, dict]:
    async with fleet.http.get(fleet.url + path) as response:
        return response.status, await response.json()


async def test_health_counts_the_workers_that_take_requests(fleet):
    assert await get(fleet, "/health") == (200, {"status": "ok", "prefill": 1, "decode": 2})


async def test_health_names_the_role_that_is_missing(make_fleet):
    fleet = await make_fleet(decodes=0)
    status, reply = await get(fleet, "/health")
    assert status == 503
    assert "decode" in reply["error"]["message"]
    assert "prefill" not in reply["error"]["message"]


async def test_health_says_that_the_router_is_away(fleet):
    fleet.router.error = RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "connection refused")
    status, reply = await get(fleet, "/health")
    assert status == 503
    assert "router" in reply["error"]["message"]


async def test_models_are_those_of_the_fleet(fleet):
    fleet.decodes[0].max_model_len = 2048
    status, reply = await get(fleet, "/v1/models")
    card = reply["data"][0]
    assert (status, reply["object"], len(reply["data"])) == (200, "list", 1)
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 2048)


async def test_version_is_that_of_the_gateway(fleet):
    assert await get(fleet, "/version") == (200, {"version": "1.2.3"})


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/completions", 405)])
async def test_errors_of_routing_are_json_too(fleet, path, status):
    given, reply = await get(fleet, path)
    assert given == reply["error"]["code"] == status


async def test_a_body_over_the_limit_is_a_413_that_names_the_limit(make_fleet):
    fleet = await make_fleet(max_body_bytes=1000)
    status, reply = await fleet.complete({**BODY, "prompt": "x" * 1000})
    assert status == 413
    assert "1000 bytes" in reply["error"]["message"]
    assert fleet.sent_to(fleet.prefills) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]"])
async def test_a_body_that_is_no_json_object_is_a_400(fleet, body):
    status, reply = await fleet.complete(body)
    assert (status, reply["error"]["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize("domain", ["x" * 257, "größe"])
async def test_a_domain_label_that_is_no_label_is_a_400(fleet, domain):
    status, reply = await fleet.complete(BODY, headers={"x-eldr-domain": domain})
    assert (status, reply["error"]["param"]) == (400, "x-eldr-domain")


async def test_a_running_stream_ends_well_within_the_grace_time(fleet):
    """Case 7.3: not ready at once, nothing new, what runs runs on."""
    pause = fleet.pause(fleet.decodes, "token")
    client = asyncio.create_task(fleet.stream(BODY))
    await pause.wait_reached()
    stopping = asyncio.create_task(fleet.server.stop(5.0))
    await asyncio.sleep(0)
    assert (await get(fleet, "/health"))[0] == 503
    assert (await fleet.complete(BODY))[0] == 503
    pause.go_on()
    status, events = await client
    await stopping
    assert (status, events[-1], len(events)) == (200, "[DONE]", 6)
    assert fleet.nothing_is_held()


async def test_a_stream_beyond_the_grace_time_ends_with_an_error_event(fleet):
    """Case 7.3: grace time shorter than the stream."""
    pause = fleet.pause(fleet.decodes, "token")
    client = asyncio.create_task(fleet.stream(BODY))
    await pause.wait_reached()
    await fleet.server.stop(0.01)
    _, events = await client
    assert "shutting down" in json.loads(events[-1])["error"]["message"]
    assert fleet.counts[Event.STREAM_CUT_AT_SHUTDOWN] == 1
    assert fleet.nothing_is_held()


async def test_a_request_without_an_answer_yet_gets_a_503_at_the_end_of_the_grace_time(fleet):
    pause = fleet.pause(fleet.prefills, "accepted")
    client = asyncio.create_task(fleet.complete(BODY))
    await pause.wait_reached()
    await fleet.server.stop(0.01)
    assert (await client)[0] == 503
    assert fleet.nothing_is_held()


@pytest.mark.parametrize(
    "field",
    ["connect_timeout_s", "prefill_timeout_s", "attempts", "connections_per_worker", "max_body_bytes"],
)
def test_settings_out_of_range_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field} must be"):
        GatewaySettings(**{field: 0})


def test_a_hand_off_may_not_outlive_the_kv_lease():
    with pytest.raises(ValueError, match=r"handoff_timeout_s must be 0\.001 to 20, got 29"):
        GatewaySettings(handoff_timeout_s=29.0)
