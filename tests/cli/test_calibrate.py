"""`eldr calibrate` writes a whole counts file or none."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner

from eldr.calibration.counts_file import load_counts
from eldr.cli.calibrate import command
from eldr.cluster import free_ports
from eldr.rpc.codec import signature_to_text
from eldr.signature import ExpertSignature

HANGING = web.AppKey("hanging", threading.Event)


def one_expert(tokens):
    return signature_to_text(
        ExpertSignature("f", 1, tokens, tokens, np.array([[tokens, 0]], dtype=np.uint32))
    )


async def completions(request):
    body = await request.json()
    tokens = len(body["prompt"])
    if body["kv_transfer_params"].get("do_remote_decode"):
        params = {"remote_request_id": "r", "eldr_signature": one_expert(tokens)}
        generated = 1
    elif "wait" in body["prompt"]:
        request.app[HANGING].set()
        await asyncio.Event().wait()
    else:
        generated = body["max_tokens"]
        params = {"eldr_decode_signature": one_expert(generated - 1)}
    return web.json_response(
        {
            "choices": [{"prompt_token_ids": [1] * tokens}],
            "usage": {"completion_tokens": generated},
            "kv_transfer_params": params,
        }
    )


async def models(_request):
    return web.json_response({"data": [{"id": "served"}]})


@pytest.fixture
def hanging():
    """Set once a request that never ends has arrived."""
    return threading.Event()


@pytest.fixture
def url(hanging):
    """A worker on a thread of its own, since the command runs its own loop."""
    port = free_ports(1)[0]
    ready = threading.Event()
    stop: list = []

    async def serve():
        app = web.Application()
        app[HANGING] = hanging
        app.router.add_post("/v1/completions", completions)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        end = asyncio.Event()
        stop.append((asyncio.get_running_loop(), end))
        ready.set()
        await end.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield f"http://127.0.0.1:{port}"
    loop, end = stop[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()


def run(*words):
    return CliRunner().invoke(command, [str(word) for word in words])


def prompts_file(tmp_path, *lines):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(lines))
    return path


def test_the_counts_of_live_workers_are_written(tmp_path, url):
    out = tmp_path / "counts.npz"
    result = run(prompts_file(tmp_path, "ab", "abc", "a"), "--out", out, "--prefill", url, "--decode", url,
                 "--limit", 2, "--output-tokens", 3)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "2 requests, 5 prompt tokens, 4 decode tokens" in result.output
    assert "output_tokens = 3" in result.output
    counts = load_counts(out)
    assert counts.ids == ("1", "2")
    np.testing.assert_array_equal(counts.prompt_len, [2, 3])
    np.testing.assert_array_equal(counts.decode_tokens, [2, 2])


def test_one_leg_alone_is_a_usage_error(tmp_path):
    result = run(prompts_file(tmp_path, "a"), "--out", tmp_path / "c.npz", "--prefill", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "give --router, or both --prefill and --decode" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--output-tokens", "1"), "output_tokens must be at least 2, got 1"),
        (("--in-flight", "0"), "in_flight must be at least 1, got 0"),
        ((), "prefill worker http://127.0.0.1:1 does not name its model"),
        (("--model", "m"), "prompt '1': worker http://127.0.0.1:1"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_written(tmp_path, words, message):
    dead = "http://127.0.0.1:1"
    out = tmp_path / "counts.npz"
    result = run(prompts_file(tmp_path, "a"), "--out", out, "--prefill", dead, "--decode", dead, *words)
    assert result.exit_code == 1
    assert message in result.output
    assert not out.exists()


def test_a_duplicate_prompt_is_refused(tmp_path):
    result = run(prompts_file(tmp_path, "a", "a"), "--out", tmp_path / "counts.npz")
    assert result.exit_code == 1
    assert "line 2: the same text as line 1" in result.output


def test_an_unreachable_router_is_named(tmp_path):
    result = run(prompts_file(tmp_path, "a"), "--out", tmp_path / "c.npz", "--router", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "router 127.0.0.1:1" in result.output


def test_an_interrupted_run_says_so_and_leaves_the_old_file_alone(tmp_path, url, hanging):
    out = tmp_path / "counts.npz"
    out.write_bytes(b"old")
    words = [
        str(prompts_file(tmp_path, "ab", "please wait")),
        f"--out={out}",
        f"--prefill={url}",
        f"--decode={url}",
    ]
    before = set(Path(tmp_path).iterdir())
    argv = [sys.executable, "-m", "eldr.cli.main", "calibrate", *words]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as child:
        assert hanging.wait(30)
        child.send_signal(signal.SIGINT)
        _, shown = child.communicate()
    assert child.returncode == 1
    assert "interrupted; nothing was written" in shown
    assert out.read_bytes() == b"old"
    assert set(Path(tmp_path).iterdir()) == before
