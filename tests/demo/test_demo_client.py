"""The timing client bounds what is in flight and turns every failure into an answer with an error."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eldr.demo.client import Completion, Request, send_all

TIMEOUT_S = 10.0


def request(name, max_tokens=2):
    return Request(name, "law", {"prompt": name, "max_tokens": max_tokens})


class Server:
    """Streams one token per event; `barrier` makes requests wait for each other."""

    def __init__(self):
        self.busy = self.most_busy = 0
        self.barrier = None
        self.bodies = []
        self.labels = []

    async def completions(self, http):
        body = await http.json()
        self.bodies.append(body)
        self.labels.append(http.headers["x-eldr-domain"])
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        if self.barrier:
            await self.barrier.wait()
        self.busy -= 1
        if body["prompt"] == "refused":
            return web.json_response({"error": "no worker"}, status=503)
        answer = web.StreamResponse()
        await answer.prepare(http)
        for token in range(body["max_tokens"] - (body["prompt"] == "short")):
            choice = {"token_ids": [token], "prompt_token_ids": [1, 2] if token == 0 else None}
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        if body["prompt"] == "broken":
            await answer.write(b'data: {"error": {"message": "lost"}}\n\n')
        if body["prompt"] != "cut":
            await answer.write(b"data: [DONE]\n\n")
        return answer


@pytest.fixture
async def server():
    fake = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("")).rstrip("/")
        yield fake


async def test_answers_keep_the_order_of_the_requests(server):
    answers = await send_all(server.url, [request(str(n), n) for n in range(2, 8)], 3, TIMEOUT_S)
    assert [answer.request_id for answer in answers] == list("234567")
    assert [answer.token_ids for answer in answers] == [tuple(range(n)) for n in range(2, 8)]
    assert all(answer.prompt_token_ids == (1, 2) and not answer.error for answer in answers)
    assert all(0 < answer.first_s <= answer.last_s for answer in answers)
    assert all(body["stream"] for body in server.bodies)
    assert set(server.labels) == {"law"}


async def test_as_many_are_in_flight_as_asked_and_no_more(server):
    server.barrier = asyncio.Barrier(4)
    done = []
    await send_all(server.url, [request(str(n)) for n in range(8)], 4, TIMEOUT_S, lambda: done.append(1))
    assert server.most_busy == 4
    assert len(done) == 8


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("refused", "HTTP 503"),
        ("broken", "lost"),
        ("cut", "the stream ended without [DONE]"),
        ("short", "1 tokens came, 2 were asked for"),
    ],
)
async def test_a_failure_is_an_answer_with_an_error(server, name, error):
    good, bad = await send_all(server.url, [request("good"), request(name)], 2, TIMEOUT_S)
    assert good.error == ""
    assert error in bad.error


async def test_an_unreachable_server_is_an_answer_with_an_error():
    (answer,) = await send_all("http://127.0.0.1:1", [request("x")], 1, TIMEOUT_S)
    assert "Cannot connect" in answer.error


async def test_a_request_that_never_ends_is_an_answer_with_an_error(server):
    server.barrier = asyncio.Barrier(2)
    (answer,) = await send_all(server.url, [request("x")], 1, 0.05)
    assert answer.error


def test_time_per_output_token_leaves_the_first_one_out():
    assert Completion("x", "", token_ids=(1, 2, 3, 4, 5), first_s=1.0, last_s=2.0).tpot_s == 0.25
