"""`eldr explain` against a real router, a fake prefill engine over HTTP and a fake PrefillService."""

import dataclasses
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner
from served_router import eldr, served_router

from eldr.cli.main import cli
from eldr.rpc.codec import signature_to_text
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.fake_services import FakePrefillWorker, fake_info
from eldr.testing.signatures import fake_signature


class PrefillEngine:
    """The HTTP side of a prefill engine: hands off every prompt to a FakePrefillWorker."""

    def __init__(self, worker):
        self.worker = worker
        self.bodies = []
        self.signature = signature_to_text(fake_signature())
        self.status = 200

    async def completions(self, request):
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="prompt too long")
        self.worker.hand_off("t1")
        params = {"remote_request_id": "t1", "eldr_signature": self.signature}
        return web.json_response({"usage": {"prompt_tokens": 32}, "kv_transfer_params": params})


@pytest.fixture
async def prefill():
    async with FakePrefillWorker("p0") as worker:
        engine = PrefillEngine(worker)
        app = web.Application()
        app.router.add_post("/v1/completions", engine.completions)
        async with TestServer(app) as http:
            worker.info = dataclasses.replace(worker.info, http_url=str(http.make_url("")).rstrip("/"))
            yield engine


@pytest.fixture
async def router(prefill):
    async with served_router() as (server, address):
        server.core.register(prefill.worker.info)
        for worker_id in ("d0", "d1"):
            server.core.register(fake_info(worker_id, WorkerRole.DECODE))
        yield server, address


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Explain quicksort.", encoding="utf-8")
    return path


async def test_a_prompt_is_scored_and_nothing_stays_behind(router, prefill, prompt):
    server, address = router
    server.core.drain("d1")
    ended = await eldr("explain", "--router", address, "--prompt-file", prompt, "--json")
    assert ended.code == 0, ended.err
    decision = json.loads(ended.out)
    assert (decision["worker_id"], decision["policy"], decision["fallback"]) == ("d0", "union-cost", "")
    by_id = {candidate["worker_id"]: candidate for candidate in decision["candidates"]}
    assert by_id["d0"]["eligible"]
    assert "union" in by_id["d0"]["reason"]
    assert by_id["d1"] == {
        "worker_id": "d1",
        "eligible": False,
        "score": None,
        "in_flight": 0,
        "reason": "draining",
    }
    body = prefill.bodies[0]
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("fake", "Explain quicksort.", 1)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill.worker.held == set()
    assert [status.bookings for status in server.core.workers()] == [0, 0, 0]


async def test_a_signature_file_needs_no_prefill_and_another_policy_can_be_asked(router, prefill, tmp_path):
    _, address = router
    path = tmp_path / "signature"
    path.write_text(signature_to_text(fake_signature()) + "\n")
    ended = await eldr("explain", "--router", address, "--signature-file", path, "--policy", "jsq")
    assert ended.code == 0, ended.err
    assert "jsq: d" in ended.out
    assert "fewest in flight" in ended.out
    assert prefill.bodies == []
    path.write_text("no signature")
    ended = await eldr("explain", "--router", address, "--signature-file", path)
    assert ended.code == 1
    assert "not base64 of a signature message" in ended.err


async def test_a_prefill_without_a_signature_shows_the_fallback(router, prefill, prompt):
    prefill.signature = None
    ended = await eldr("explain", "--router", router[1], "--prompt-file", prompt)
    assert ended.code == 0, ended.err
    assert "fallback: no-signature" in ended.out


async def test_a_refused_prefill_is_told_and_releases_its_booking(router, prefill, prompt):
    server, address = router
    prefill.status = 400
    ended = await eldr("explain", "--router", address, "--prompt-file", prompt)
    assert ended.code == 1
    assert "400 prompt too long" in ended.err
    assert [status.bookings for status in server.core.workers()] == [0, 0, 0]


def test_exactly_one_source_is_needed(prompt):
    for words in ([], ["--prompt-file", str(prompt), "--signature-file", str(prompt)]):
        ended = CliRunner().invoke(cli, ["explain", *words])
        assert ended.exit_code == 2
        assert "give either --prompt-file or --signature-file" in ended.output
