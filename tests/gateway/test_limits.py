"""Admission, deadlines and large bodies through the whole gateway."""

import asyncio
import errno
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from gateway_fleet import text_of

from eldr.client import Outcome
from eldr.gateway.big_bodies import BodyParser, encoded, taken_apart
from eldr.gateway.breaker import Fault as Blame
from eldr.gateway.counters import Counts, Event
from eldr.gateway.engine_client import transport_error
from eldr.gateway.errors import GatewayError
from eldr.gateway.file_limit import raise_file_limit, requests_within
from eldr.gateway.legs import Endpoint, parse_body, prompt_prefix
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5, "seed": 7}


async def test_a_flood_of_one_client_is_a_429_with_retry_after_and_others_are_served(make_fleet):
    fleet = await make_fleet(tenant_requests=2, tenant_waiting=1)
    pause = fleet.pause(fleet.decodes, "accepted")
    flood = {"headers": {"Authorization": "Bearer one"}}
    running = [asyncio.create_task(fleet.complete(BODY, **flood)) for _ in range(3)]
    await pause.wait_reached(2)
    await fleet.until(lambda: fleet.counts[Event.REQUEST_QUEUED] == 1)
    async with fleet.post("/v1/completions", BODY, **flood) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["type"] == "RateLimitError"
    other = asyncio.create_task(fleet.complete(BODY, headers={"Authorization": "Bearer two"}))
    await pause.wait_reached(3)
    pause.go_on()
    assert [status for status, _ in await asyncio.gather(*running, other)] == [200] * 4
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_a_full_gateway_answers_its_health_check_at_once(make_fleet):
    """Case 7.8: the probe takes no turn."""
    fleet = await make_fleet(max_requests=1, max_waiting=1)
    pause = fleet.pause(fleet.decodes, "accepted")
    clients = [asyncio.create_task(fleet.complete(BODY)) for _ in range(2)]
    await pause.wait_reached()
    async with fleet.http.get(fleet.url + "/health") as response:
        assert response.status == 200
    pause.go_on()
    assert [status for status, _ in await asyncio.gather(*clients)] == [200, 200]


@pytest.mark.parametrize("stage", ["router", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_of_the_client_ends_the_request_wherever_it_is(make_fleet, stage, stream):
    fleet = await make_fleet(breaker_failures=1)
    if stage == "router":
        fleet.router.gates["select_prefill"] = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, fleet.router.gates["select_prefill"].set)
    else:
        for engine in fleet.prefills if stage == "prefill" else fleet.decodes:
            engine.fault = Fault(FaultKind.HANG)
    headers = {"x-eldr-timeout": "0.1"}
    async with fleet.post("/v1/completions", {**BODY, "stream": stream}, headers=headers) as response:
        assert response.status == 504
        assert "x-eldr-timeout" in (await response.json())["error"]["message"]
    await fleet.settled()
    assert fleet.nothing_is_held()
    assert fleet.counts[Event.DEADLINE_PASSED] == 1
    assert fleet.counts[Event.BREAKER_OPENED] == 0, "a client's short deadline is no worker's fault"
    assert {outcome for _, outcome, _ in fleet.router.released} == {Outcome.CANCELLED}


async def test_a_deadline_in_a_stream_ends_it_with_an_error_event(make_fleet):
    fleet = await make_fleet(breaker_failures=1)
    for engine in fleet.decodes:
        engine.fault = Fault(FaultKind.STALL, after_tokens=2)
    status, events = await fleet.stream(BODY, headers={"x-eldr-timeout": "0.2"})
    assert (status, len(events)) == (200, 3)
    assert json.loads(events[-1])["error"]["code"] == 504
    assert fleet.counts[Event.BREAKER_OPENED] == 0
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_a_deadline_counts_while_the_request_waits_for_its_turn(make_fleet):
    fleet = await make_fleet(max_requests=1)
    pause = fleet.pause(fleet.decodes, "accepted")
    running = asyncio.create_task(fleet.complete(BODY))
    await pause.wait_reached()
    status, _ = await fleet.complete(BODY, headers={"x-eldr-timeout": "0.05"})
    assert status == 429
    pause.go_on()
    assert (await running)[0] == 200


async def test_the_router_is_told_what_is_left_of_the_deadline_and_of_the_hand_off(make_fleet):
    fleet = await make_fleet(handoff_timeout_s=10.0)
    await fleet.complete(BODY, headers={"x-eldr-timeout": "4"})
    select, reserve = fleet.router.timeouts
    assert 3 < reserve < select <= 4
    await fleet.complete(BODY)
    assert 9 < fleet.router.timeouts[-1] <= 10


async def test_a_body_that_never_ends_gives_its_turn_back(make_fleet):
    fleet = await make_fleet(read_timeout_s=0.1, max_requests=1)

    async def slowly():
        yield b'{"model": '
        await asyncio.sleep(5)

    async with fleet.http.post(fleet.url + "/v1/completions", data=slowly()) as response:
        assert response.status == 408
    assert (await fleet.complete(BODY))[0] == 200


@pytest.mark.parametrize("ids", [False, True])
async def test_a_large_body_is_parsed_in_another_process_and_served_alike(fleet, ids):
    prompt = list(range(60_000)) if ids else "word " * 60_000
    for engine in (*fleet.prefills, *fleet.decodes, fleet.plain):
        engine.max_model_len = 1 << 20
    body = {**BODY, "prompt": prompt}
    status, reply = await fleet.complete(body)
    assert (status, text_of(reply)) == (200, await fleet.text_of_plain(body))
    assert fleet.counts[Event.BODY_BIG] == 1
    assert fleet.sent_to(fleet.prefills)[0]["prompt"] == prompt
    assert fleet.sent_to(fleet.decodes)[0]["prompt"] == prompt
    assert fleet.router.prefixes == [prompt_prefix(Endpoint.COMPLETIONS, body)]
    await fleet.settled()
    assert fleet.nothing_is_held()


async def test_a_large_body_is_refused_like_a_small_one():
    parser = BodyParser(Counts(), big_body_bytes=10)
    try:
        for body in ({"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}):
            raw = json.dumps(body).encode()
            with pytest.raises(GatewayError) as large:
                await parser.parse(Endpoint.COMPLETIONS, raw)
            with pytest.raises(GatewayError) as small:
                parse_body(Endpoint.COMPLETIONS, raw)
            assert (large.value.status, large.value.message, large.value.param) == (
                small.value.status,
                small.value.message,
                small.value.param,
            )
    finally:
        parser.close()


async def test_a_parser_that_dies_is_a_503_and_the_next_body_starts_another(monkeypatch):
    parser = BodyParser(Counts(), big_body_bytes=10)
    raw = json.dumps({"prompt": "a b c"}).encode()
    try:
        await parser.parse(Endpoint.COMPLETIONS, raw)
        pool = parser._pool
        assert isinstance(pool, ProcessPoolExecutor)
        for pid in list(pool._processes):
            os.kill(pid, 9)
        with pytest.raises(GatewayError) as refusal:
            await parser.parse(Endpoint.COMPLETIONS, raw)
        assert refusal.value.status == 503
        assert (await parser.parse(Endpoint.COMPLETIONS, raw)).prefix == b"a b c"
    finally:
        parser.close()


def test_a_field_that_a_leg_sets_itself_wins_over_the_raw_one():
    parsed = taken_apart(Endpoint.COMPLETIONS, b'{"prompt": "a", "model": "m"}', False)
    assert json.loads(encoded(parsed.body, parsed.raw)) == {"model": "m", "prompt": "a"}
    assert json.loads(encoded({"prompt": [1]}, parsed.raw)) == {"prompt": [1]}
    assert json.loads(encoded({}, parsed.raw)) == {"prompt": "a"}


def test_no_file_descriptor_left_is_no_workers_fault():
    """Case 7.5."""
    error = transport_error("d0", aiohttp.ClientOSError(errno.EMFILE, "Too many open files"))
    assert error.fault is Blame.NONE
    assert error.as_gateway_error().status == 503


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_the_parser_ends_with_a_gateway_that_is_killed():
    script = (
        "import asyncio, os\n"
        "from eldr.gateway.big_bodies import BodyParser\n"
        "from eldr.gateway.counters import Counts\n"
        "from eldr.gateway.legs import Endpoint\n"
        "async def main():\n"
        "    parser = BodyParser(Counts(), big_body_bytes=1)\n"
        '    await parser.parse(Endpoint.COMPLETIONS, b\'{"prompt": "a"}\')\n'
        "    print(*parser._pool._processes, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    async with asyncio.timeout(20):
        while is_running(int(out)):  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("files", "requests"), [(256, 64), (1024, 320), (10, 1), (-1, 1 << 30)])
def test_requests_fit_into_the_files_that_may_be_open(files, requests):
    """Case 7.5."""
    assert requests_within(files) == requests


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes():
    written = []
    assert raise_file_limit(lambda _: (1024, 4096), lambda _, limits: written.append(limits)) == 4096
    assert written == [(4096, 4096)]
