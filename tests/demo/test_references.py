"""The references' answers are read, or the run says what they answered instead."""

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from eldr.demo.client import Request
from eldr.demo.compare import ReferenceOutput
from eldr.demo.references import (
    ReferenceRunError,
    counts_file,
    counts_job,
    read_counts,
    read_output,
    reference_outputs,
)


def reply(tokens, best):
    return {"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": best}}]}


def test_the_gap_is_between_the_two_best_even_where_another_token_was_drawn():
    output = read_output(reply([7, 8], [{"a": -3.0, "b": -0.5, "c": -0.75}, {"a": -0.1, "b": -2.1}]))
    assert output == ReferenceOutput((7, 8), (0.25, 2.0))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"choices": []},
        reply([7], None),
        reply([7], [{"a": -0.1}]),
        reply([7, 8], [{"a": -0.1, "b": -1.0}]),
    ],
)
def test_a_reply_that_cannot_be_compared_is_refused(bad):
    with pytest.raises(ReferenceRunError):
        read_output(bad)


async def test_every_request_gets_its_output_and_logprobs_are_asked_for():
    bodies = []

    async def completions(http):
        bodies.append(await http.json())
        return web.json_response(reply([bodies[-1]["prompt"]], [{"a": -0.1, "b": -1.1}]))

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    requests = [Request(str(n), "d", {"prompt": n}) for n in range(5)]
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        outputs = await reference_outputs(url, requests, 2, 10.0)
    assert {name: output.token_ids for name, output in outputs.items()} == {str(n): (n,) for n in range(5)}
    assert all(body["logprobs"] == 2 and body["return_tokens_as_token_ids"] for body in bodies)


async def test_a_failing_server_ends_the_run_with_its_answer():
    async def completions(_http):
        return web.json_response({"error": "out of memory"}, status=500)

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(ReferenceRunError, match=r"0: HTTP 500.*out of memory"):
            await reference_outputs(url, [Request("0", "d", {})], 2, 10.0)


def test_the_counts_job_gets_the_token_ids(tmp_path):
    job = counts_job(tmp_path / "script.py", tmp_path / "model", [(1, 2), (3,)], tmp_path)
    assert job.is_job
    assert (tmp_path / "reference-prompts.json").read_text() == "[[1, 2], [3]]"
    assert job.argv[1:] == tuple(
        str(tmp_path / name)
        for name in ("script.py", "model", "reference-prompts.json", "reference-counts.npz")
    )


def test_counts_are_read_one_a_prompt(tmp_path):
    np.savez(counts_file(tmp_path), counts=np.arange(12).reshape(2, 2, 3))
    np.testing.assert_array_equal(read_counts(tmp_path, 2)[1], [[6, 7, 8], [9, 10, 11]])
    with pytest.raises(ReferenceRunError, match="counted 2 prompts, 3 were asked for"):
        read_counts(tmp_path, 3)


def test_missing_counts_are_named(tmp_path):
    with pytest.raises(ReferenceRunError, match=r"reference-counts\.npz"):
        read_counts(tmp_path, 1)
