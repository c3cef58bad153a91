"""`eldr calibrate` writes a whole counts file or none."""

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner

from eldr.calibration.counts_file import load_counts
from eldr.cli.calibrate import command
from eldr.cluster import free_ports
from eldr.rpc.codec import signature_from_text, signature_to_text
from eldr.signature import ExpertSignature, ModelGeometry
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker

HANGING = web.AppKey("hanging", threading.Event)
PATIENT = web.AppKey("patient", threading.Event)
ASKED = web.AppKey("asked", list)


def one_expert(tokens):
    return signature_to_text(
        ExpertSignature("f", 1, tokens, tokens, np.array([[tokens, 0]], dtype=np.uint32))
    )


async def completions(request):
    body = await request.json()
    tokens = len(body["prompt"])
    request.app[ASKED].append(body["prompt"])
    if body["kv_transfer_params"].get("do_remote_decode"):
        params = {"remote_request_id": "r", "eldr_signature": one_expert(tokens)}
        generated = 1
    elif "wait" in body["prompt"] and not request.app[PATIENT].is_set():
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
def patient():
    """Set where requests that hang otherwise are answered."""
    return threading.Event()


@pytest.fixture
def asked():
    """The prompts of all legs that arrived."""
    return []


@pytest.fixture
def url(hanging, patient, asked):
    """A worker on a thread of its own, since the command runs its own loop."""
    port = free_ports(1)[0]
    ready = threading.Event()
    stop: list = []

    async def serve():
        app = web.Application()
        app[HANGING], app[PATIENT], app[ASKED] = hanging, patient, asked
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


class FakeOffline:
    """An engine without vLLM: every token selects expert 0 of one layer. It may break at the third prompt."""

    moe_layers = (5,)
    max_model_len = 64

    def __init__(self, model, settings, breaks):
        self.model, self.settings, self.breaks = model, settings, breaks
        self.ran = []
        self.closed = False

    def encode(self, text, last=None):
        return list(text)[-last if last else 0 :]

    def request(self, request_id, token_ids, **sampling):
        return request_id, len(token_ids), sampling["max_tokens"] - 1

    def run(self, requests):
        for request_id, prompt, decode in requests:
            if self.breaks and request_id == "2":
                raise RuntimeError(f"request {request_id!r} broke")
            self.ran.append(request_id)
            legs = [signature_from_text(one_expert(tokens)) for tokens in (prompt, decode)]
            yield SimpleNamespace(id=request_id, prefill=legs[0], decode=legs[1])

    def gate_sums(self, ids):
        sums = np.full((1, 2), len(ids), np.float32)
        return sums, -sums

    def close(self):
        self.closed = True


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
        (("--output-tokens", "0"), "output_tokens must be at least 1, got 0"),
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


@pytest.fixture
def interrupted(tmp_path, url, hanging):
    """The words of a run that was interrupted with one of two prompts finished, and what it showed."""
    out = tmp_path / "counts.npz"
    out.write_bytes(b"old")
    words = [
        str(prompts_file(tmp_path, "ab", "please wait")),
        f"--out={out}",
        f"--prefill={url}",
        f"--decode={url}",
    ]
    argv = [sys.executable, "-m", "eldr.cli.main", "calibrate", *words, "--in-flight=1"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert hanging.wait(90)
            child.send_signal(signal.SIGINT)
            _, shown = child.communicate(timeout=20)
        finally:
            child.kill()
    assert child.returncode == 1
    return words, out, shown


def test_an_interrupted_run_says_so_and_leaves_the_old_file_alone(interrupted):
    _, out, shown = interrupted
    assert f"interrupted; the same command goes on from {out}.partial" in shown.replace("\n", "")
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "counts.npz",
        "counts.npz.partial",
        "prompts.txt",
    ]


def test_an_interrupted_run_goes_on_where_it_stopped(interrupted, asked, patient):
    words, out, _ = interrupted
    asked.clear()
    patient.set()
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "1 of 2 requests are finished in" in result.output
    assert asked == ["please wait"] * 2
    assert load_counts(out).ids == ("1", "2")
    assert not out.with_name("counts.npz.partial").exists()


def test_a_changed_setting_does_not_resume_and_names_both_values(interrupted):
    words, out, _ = interrupted
    result = run(*words, "--output-tokens", 9)
    assert result.exit_code == 1
    assert "was begun with output_tokens 64, now 9" in result.output
    assert "--restart" in result.output
    assert out.read_bytes() == b"old"


def test_changed_prompts_do_not_resume(interrupted):
    words, _, _ = interrupted
    Path(words[0]).write_text("ab\nsomething else")
    result = run(*words)
    assert result.exit_code == 1
    assert "was begun with prompts_sha256" in result.output


def test_a_restart_forgets_what_was_finished(interrupted, asked, patient):
    words, out, _ = interrupted
    asked.clear()
    patient.set()
    result = run(*words, "--restart", "--output-tokens", 9)
    assert result.exit_code == 0, result.output
    assert sorted(asked) == ["ab"] * 2 + ["please wait"] * 2
    assert load_counts(out).decode_tokens.tolist() == [8, 8]


def test_more_in_flight_resumes(interrupted, patient):
    words, _, _ = interrupted
    patient.set()
    assert run(*words, "--in-flight", 7).exit_code == 0


def test_held_out_prompts_are_refused(tmp_path, url):
    held = tmp_path / "held.jsonl"
    held.write_text('{"id": "h7", "text": "abc"}\n')
    out = tmp_path / "c.npz"
    result = run(prompts_file(tmp_path, "ab", "abc"), "--out", out, "--prefill", url, "--decode", url,
                 "--held-out", held)  # fmt: skip
    assert result.exit_code == 1
    assert "1 of 2 prompts are held out too" in result.output
    assert "prompt '2' is the held-out 'h7'" in result.output
    assert not out.exists()


def test_domains_are_reported_with_their_tokens(tmp_path, url):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"text": "ab", "domain": "law"}\n{"text": "abcd", "domain": "law"}\n{"text": "a", "domain": "code"}\n'
        '{"text": "abc"}'
    )
    result = run(path, "--out", tmp_path / "c.npz", "--prefill", url, "--decode", url, "--output-tokens", 3)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["law", "2", "6", "4"] in rows
    assert ["code", "1", "1", "2"] in rows
    assert ["(none)", "1", "3", "2"] in rows


async def test_workers_are_found_by_their_grpc_addresses(tmp_path, url):
    """The counts travel over HTTP as ever; who serves what, and the layers' indices, the gRPC services say."""
    info = {"http_url": url, "served_model": "m", "geometry": ModelGeometry((5,), 2, 1, "f")}
    out = tmp_path / "c.npz"
    async with FakePrefillWorker("p0", **info) as prefill, FakeDecodeWorker("d0", **info) as decode:
        words = (prompts_file(tmp_path, "ab"), "--out", out, "--output-tokens", 3)
        result = await asyncio.to_thread(
            run, *words, "--prefill", prefill.address, "--decode", decode.address
        )
        assert result.exit_code == 0, result.output
        swapped = await asyncio.to_thread(
            run, *words, "--prefill", decode.address, "--decode", prefill.address
        )
        named = await asyncio.to_thread(
            run, *words, "--prefill", prefill.address, "--decode", decode.address, "--model", "n"
        )
    assert load_counts(out).moe_layers == (5,)
    assert f"worker {decode.address} is a decode worker, given as a prefill worker" in swapped.output
    assert "serves 'm', not 'n'" in named.output


async def test_workers_of_two_models_are_refused_with_both_values(tmp_path, url):
    async with (
        FakePrefillWorker("p0", http_url=url) as prefill,
        FakeDecodeWorker("d0", http_url=url, block_size=64) as decode,
    ):
        words = (prompts_file(tmp_path, "ab"), "--out", tmp_path / "c.npz")
        result = await asyncio.to_thread(
            run, *words, "--prefill", prefill.address, "--decode", decode.address
        )
    assert result.exit_code == 1
    assert f"worker d0 has block_size 64, worker p0 has {prefill.info.block_size}" in result.output


def test_a_grpc_address_nobody_listens_on_is_named(tmp_path):
    words = (prompts_file(tmp_path, "ab"), "--out", tmp_path / "c.npz")
    result = run(*words, "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "worker 127.0.0.1:1" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gate",), "--gate and --engine-arg go with --offline"),
        (("--engine-arg", "a=1"), "--gate and --engine-arg go with --offline"),
        (("--offline", "m", "--engine-arg", "a"), "must be NAME=VALUE"),
        (("--offline", "m", "--prefill", "a:1", "--decode", "b:1"), "--offline runs no workers"),
        (("--offline", "m", "--model", "n"), "--offline runs no workers"),
    ],
)
def test_words_that_do_not_go_together_are_a_usage_error(tmp_path, words, message):
    result = run(prompts_file(tmp_path, "a"), "--out", tmp_path / "c.npz", *words)
    assert result.exit_code == 2
    assert message in result.output


def test_offline_without_vllm_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "eldr.engine.offline", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = run(prompts_file(tmp_path, "a"), "--out", tmp_path / "c.npz", "--offline", "m")
    assert result.exit_code == 1
    assert "--offline needs vLLM 0.32.0 in this Python, and 'vllm' is missing" in result.output
    assert not list(tmp_path.glob("*.partial"))


def test_an_offline_run_is_bound_to_model_arguments_and_gate(tmp_path, monkeypatch):
    """An engine that stands in for vLLM; it breaks at the third prompt, then the run goes on."""
    made = []

    def start(model, **settings):
        made.append(FakeOffline(model, settings, breaks=len(made) == 0))
        return made[-1]

    monkeypatch.setattr("eldr.cli.calibrate.offline_engine", start)
    out = tmp_path / "c.npz"
    words = (prompts_file(tmp_path, "ab", "abc", "a"), "--out", out, "--offline", "m", "--output-tokens", 3)
    more = ("--gate", "--engine-arg", "max-model-len=64", "--engine-arg", "dtype=float32", "--in-flight", 2)
    failed = run(*words, *more)
    assert failed.exit_code == 1
    assert "request '2' broke" in failed.output
    changed = run(*words, *more, "--engine-arg", "dtype=float16")
    assert "'dtype': 'float32'" in changed.output
    assert "'dtype': 'float16'" in changed.output
    assert "was begun with gate True, now False" in run(*words, *more[1:]).output
    result = run(*words, *more)
    assert result.exit_code == 0, result.output
    assert made[-1].settings == {
        "in_flight": 2,
        "gate": True,
        "arguments": {"max_model_len": 64, "dtype": "float32"},
    }
    assert made[-1].ran == ["2"]
    assert all(engine.closed for engine in made)
    counts = load_counts(out)
    assert counts.ids == ("1", "2", "3")
    assert counts.moe_layers == (5,)
    assert counts.gate_logit[:, 0, 0].tolist() == [-2.0, -3.0, -1.0]
