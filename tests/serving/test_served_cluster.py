"""A real cluster behind router and gateway answers what one ordinary vLLM server answers."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from serving_support import MODEL, Served, assert_nothing_is_held, extra_gateway, metric

from eldr.calibration.counts_file import load_counts, load_merged
from eldr.client import RouterClient
from eldr.cluster import Command
from eldr.cluster.ports import LOOPBACK, free_ports
from eldr.cluster.readiness import port_ready
from eldr.demo.client import Request, send_all
from eldr.demo.compare import ReferenceOutput, compare_outputs
from eldr.demo.references import reference_outputs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

POLICIES = ["random", "round-robin", "jsq", "p2c", "locality-band", "union-cost"]
REQUESTS = 200


def body_of(prompt: Any, seed: int, tokens: int = 12, **more: Any) -> dict[str, Any]:
    """Greedy for every second request, seeded sampling for the others."""
    sampling = {"temperature": 0.0} if seed % 2 else {"temperature": 0.8, "seed": seed}
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
        **more,
    }


def workload(texts: list[str], count: int = REQUESTS) -> list[Request]:
    """Every fifth prompt repeats an earlier one, so that prefix caches are hit."""
    return [Request(str(i), "", body_of(texts[i - 3 if i % 5 == 4 else i], seed=i + 1)) for i in range(count)]


@pytest.fixture(scope="module")
def expected(served: Served, texts: list[str]) -> dict[str, ReferenceOutput]:
    return asyncio.run(reference_outputs(served.ordinary_url, workload(texts), 16, 600))


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def scraped(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url + "/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("policy", POLICIES)
async def test_outputs_are_those_of_one_ordinary_server(
    policy: str, served: Served, texts: list[str], expected: dict[str, ReferenceOutput], profile: bytes
) -> None:
    async with RouterClient(served.router) as router:
        if policy == "locality-band":
            await router.load_profile(profile)
        assert (await router.set_policy(policy)).policy == policy
        before = {w.info.worker_id: w.state for w in await router.workers() if w.info.role == "decode"}
        answers = await send_all(served.gateway_url, workload(texts), 32, 300)
        assert [answer.error for answer in answers if answer.error] == []
        check = compare_outputs(answers, expected)
        assert (check.checked, check.different) == (REQUESTS, ())
        await assert_nothing_is_held(served)
        grown = [
            worker.state.totals.decode_tokens - before[worker.info.worker_id].totals.decode_tokens
            for worker in await router.workers()
            if worker.info.role == "decode"
        ]
    assert all(tokens > 0 for tokens in grown), f"{policy} used only one decoder: {grown}"


async def test_decoders_pulled_every_prompt_token_and_recomputed_none(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """The last prompt token is run again to sample the first output token; vLLM does not count it as computed."""
    answers = await send_all(served.gateway_url, workload(texts, 40), 16, 120)
    assert not any(answer.error for answer in answers)
    pulled = cached = 0.0
    for url in served.decode_urls:
        text = await scraped(http, url)
        by_source = "vllm:prompt_tokens_by_source_total"
        assert metric(text, by_source, source="local_compute") == 0
        pulled += metric(text, by_source, source="external_kv_transfer")
        cached += metric(text, by_source, source="local_cache_hit")
    assert pulled > 0
    prefill = await scraped(http, served.fleet.layout.prefill[0].http_url)
    assert metric(prefill, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") > 0


async def test_a_wait_for_a_decoder_longer_than_the_lease_keeps_the_kv(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Case 2.27: 32 run slots are taken for longer than the lease of 6 s; what waits behind them stays right."""
    # NIXL's own expiry counter of the prefill worker must not move.
    expired = "vllm:nixl_num_kv_expired_reqs_total"
    before = metric(await scraped(http, served.fleet.layout.prefill[0].http_url), expired)
    long = [Request(f"long-{i}", "", body_of(texts[300 + i][:120], 2 * i + 1, tokens=600)) for i in range(32)]
    short = [Request(f"short-{i}", "", body_of(texts[400 + i], 2 * i + 2, tokens=8)) for i in range(8)]
    started = time.monotonic()
    occupied = asyncio.create_task(send_all(served.gateway_url, long, 32, 300))
    await asyncio.sleep(1.0)
    answers = await send_all(served.gateway_url, short, 8, 300)
    waited = time.monotonic() - started
    assert [answer.error for answer in [*answers, *await occupied] if answer.error] == []
    assert waited > 6.0 + 1.0, f"the slots were free after {waited:.1f} s: no lease was outlasted"
    expected = await reference_outputs(served.ordinary_url, short, 8, 120)
    assert compare_outputs(answers, expected).different == ()
    after = metric(await scraped(http, served.fleet.layout.prefill[0].http_url), expired)
    assert after == before
    await assert_nothing_is_held(served)


async def test_two_requests_with_one_client_id_both_get_their_own_text(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Case 2.15."""
    url = served.gateway_url + "/v1/completions"
    bodies = [body_of(texts[i], 2 * i + 1, tokens=24, request_id="same") for i in (500, 501)]
    headers = {"X-Request-Id": "same"}
    answers = await asyncio.gather(*(post(http, url, body, **headers) for body in bodies))
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert status == 200
        _, alone = await post(http, served.ordinary_url + "/v1/completions", {**body, "request_id": "x"})
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "more",
    [{"min_tokens": 3, "max_tokens": 8}, {"max_tokens": None}, {}],
    ids=["min_tokens", "max_tokens null", "max_tokens absent"],
)
async def test_output_limits_of_a_completion_are_the_clients_own(
    more: dict[str, Any], served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Cases 2.11 and 2.12."""
    body = {"model": MODEL, "prompt": texts[510], "temperature": 0.0, "return_token_ids": True, **more}
    status, answer = await post(http, served.gateway_url + "/v1/completions", body)
    _, alone = await post(http, served.ordinary_url + "/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]


@pytest.mark.parametrize("limit", [{"max_completion_tokens": 9}, {"max_tokens": 9}])
async def test_a_chat_answers_what_the_ordinary_server_answers(
    limit: dict[str, int], served: Served, http: aiohttp.ClientSession
) -> None:
    """Case 2.12: max_completion_tokens alone."""
    messages = [{"role": "user", "content": "def quicksort(items):"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0.0, "ignore_eos": True, **limit}
    status, answer = await post(http, served.gateway_url + "/v1/chat/completions", body)
    _, alone = await post(http, served.ordinary_url + "/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"] == 9


async def test_a_prompt_that_is_too_long_is_a_400_at_once(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Case 2.7."""
    begin = time.monotonic()
    status, answer = await post(
        http, served.gateway_url + "/v1/completions", body_of(" ".join(texts[:20]), seed=1)
    )
    assert status == 400
    assert "768" in str(answer)
    assert time.monotonic() - begin < 2.0
    await assert_nothing_is_held(served)


async def test_a_decoder_that_refuses_leaves_nothing_held_at_prefill(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Case 2.2: more log-probabilities than the engine gives, which only the decode leg asks for."""
    status, answer = await post(
        http, served.gateway_url + "/v1/completions", body_of(texts[0], seed=1, logprobs=1000)
    )
    assert status == 400
    assert "logprobs" in str(answer)
    await assert_nothing_is_held(served, within_s=1.0)


async def test_clients_that_go_away_leave_nothing_behind(
    served: Served, texts: list[str], http: aiohttp.ClientSession
) -> None:
    """Case 3.1: disconnects before the first token and in mid-stream."""

    async def begin_and_leave(i: int) -> None:
        body = {**body_of(texts[600 + i], 2 * i + 1, tokens=400), "stream": True}
        try:
            async with (
                asyncio.timeout(0.02 * i),
                http.post(served.gateway_url + "/v1/completions", json=body) as response,
            ):
                await response.read()
        except TimeoutError:
            return

    await asyncio.gather(*(begin_and_leave(i) for i in range(1, 41)))
    await assert_nothing_is_held(served)
    async with RouterClient(served.router) as router:
        deadline = time.monotonic() + 10
        while any(w.state and w.state.running + w.state.waiting for w in await router.workers()):
            assert time.monotonic() < deadline, "a decoder still runs what nobody reads"
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def first_token_url(served: Served) -> Iterator[str]:
    """A second gateway on the same fleet, which sends the first token from prefill."""
    with extra_gateway(served, "gateway-first-token", "--first-token-from-prefill") as url:
        yield url


async def test_the_first_token_from_prefill_changes_no_greedy_output(
    served: Served, texts: list[str], first_token_url: str, http: aiohttp.ClientSession
) -> None:
    """Case 2.23: a decode prompt one token longer than the prefilled one, at and around the block size of 32.

    Every prompt is sent three times, so that decoders have none, some or all of it in their prefix caches.
    """
    path = "/v1/completions"
    _, reply = await post(http, served.ordinary_url + path, body_of(" ".join(texts[700:702]), 1, tokens=1))
    ids = reply["choices"][0]["prompt_token_ids"]
    prompts: list[Any] = [ids[:length] for length in (31, 32, 33, 63, 64, 65, 97)]
    prompts += texts[710:722]
    requests = [
        Request(f"{turn}-{i}", "", body_of(prompt, seed=1, tokens=(2, 12)[i % 2]))
        for turn in range(3)
        for i, prompt in enumerate(prompts)
    ]
    answers = await send_all(first_token_url, requests, 8, 300)
    assert [answer.error for answer in answers if answer.error] == []
    expected = await reference_outputs(served.ordinary_url, requests, 8, 300)
    check = compare_outputs(answers, expected)
    assert (check.checked, check.different) == (len(requests), ())
    await assert_nothing_is_held(served)


@pytest.mark.parametrize("more", [{}, {"min_tokens": 5, "ignore_eos": False}, {"max_tokens": 1}])
async def test_an_answer_that_begins_at_prefill_has_the_fields_of_the_ordinary_one(
    more: dict[str, Any], served: Served, texts: list[str], first_token_url: str, http: aiohttp.ClientSession
) -> None:
    body = {**body_of(texts[730], seed=1, tokens=9), **more}
    _, alone = await post(http, served.ordinary_url + "/v1/completions", body)
    status, answer = await post(http, first_token_url + "/v1/completions", body)
    assert status == 200
    for reply in (alone, answer):
        del reply["id"], reply["created"], reply["system_fingerprint"]
    assert answer == alone
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    streams = []
    for url in (served.ordinary_url, first_token_url):
        async with http.post(url + "/v1/completions", json={**body, **options}) as response:
            began_at_prefill = (
                "x-eldr-prefill" in response.headers and "x-eldr-decode" not in response.headers
            )
            lines = [line[6:] for line in (await response.text()).split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        assert len({(event.pop("id"), event.pop("created")) for event in events}) == 1
        events[-1].pop("system_fingerprint", None)
        streams.append(events)
    assert began_at_prefill
    assert streams[1] == streams[0]
    await assert_nothing_is_held(served)


@pytest.fixture
def recording_url(served: Served, tmp_path: Path) -> Iterator[str]:
    """A gateway on the same fleet that records the counts of every request in `tmp_path`/live."""
    listen = f"{LOOPBACK}:{free_ports(1)[0]}"
    words = ("gateway", f"--listen={listen}", f"--router={served.router}", "--first-token-from-prefill")
    record = (f"--record-counts={tmp_path / 'live'}", "--record-share=1")
    supervisor = served.fleet.supervisor
    supervisor.start(Command("gateway-recording", (sys.executable, "-m", "eldr.cli.main", *words, *record)))
    supervisor.wait_ready("gateway-recording", port_ready(listen), 60)
    yield f"http://{listen}"
    supervisor.stop("gateway-recording")


async def test_counts_recorded_from_live_traffic_are_those_of_a_calibration(
    served: Served,
    texts: list[str],
    recording_url: str,
    first_token_url: str,
    tmp_path: Path,
    http: aiohttp.ClientSession,
) -> None:
    """Whole answers, streams and answers that begin at prefill; what the client gets is what it gets elsewhere."""
    prompts = texts[800:812]
    paths = (served.gateway_url, first_token_url)
    for i, prompt in enumerate(prompts):
        # A sampled request takes the ordinary path; at temperature 0 the first token comes from prefill.
        greedy = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i // 2}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 10, "ignore_eos": True, "stream": i % 3 == 0}
        answers = []
        for url in (recording_url, paths[i % 2]):
            headers = {"x-eldr-domain": f"d{i % 2}"}
            async with http.post(f"{url}/v1/completions", json=body | greedy, headers=headers) as response:
                assert response.status == 200
                answers.append(re.sub(rb'"(id|created)":("[^"]*"|\d+),', b"", await response.read()))
        assert answers[0] == answers[1]
        assert b"eldr" not in answers[0]
    # Stopped by vLLM's front end, which tells the engine afterwards; nothing else is running then.
    stop = json.loads(answers[0])["choices"][0]["text"][3:6]
    status, stopped = await post(http, f"{recording_url}/v1/completions", {**body, **greedy, "stop": stop})
    assert (status, stopped["choices"][0]["stop_reason"]) == (200, stop)
    served.fleet.supervisor.stop("gateway-recording")
    live = load_merged(sorted((tmp_path / "live").glob("live-*.npz")))
    assert live.domains == (*(f"d{i % 2}" for i in range(len(prompts))), "")
    assert live.decode_tokens[:-1].tolist() == [9] * len(prompts)
    assert 0 <= live.decode_tokens[-1] <= 9
    for first, temperature in ((0, 0.8), (1, 0.0)):
        lines, out = tmp_path / f"{first}.jsonl", tmp_path / f"{first}.npz"
        lines.write_text(
            "\n".join(json.dumps({"text": text}) for text in prompts[first::2]), encoding="utf-8"
        )
        words = [str(lines), f"--out={out}", f"--router={served.router}", "--output-tokens=10"]
        words.append(f"--temperature={temperature}")
        calibrate = (sys.executable, "-m", "eldr.cli.main", "calibrate", *words)
        child = await asyncio.create_subprocess_exec(*calibrate)
        assert await child.wait() == 0
        calibrated = load_counts(out)
        for name in ("fingerprint", "top_k", "moe_layers"):
            assert getattr(live, name) == getattr(calibrated, name)
        for name in ("prompt_len", "prefill_counts", "decode_counts"):
            np.testing.assert_array_equal(getattr(live, name)[:-1][first::2], getattr(calibrated, name))
    await assert_nothing_is_held(served)
