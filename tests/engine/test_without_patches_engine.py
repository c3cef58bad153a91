"""What a vLLM without eldr's patches still gives, and how near the connector's own count of the queue comes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr import patching
from eldr.cluster.ports import free_ports
from eldr.rpc.codec import signature_from_text

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def stock_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with upstream's own vLLM: the installed one behind symbolic links, its patched files reverted."""
    installed = patching.find_installed().root
    folder = tmp_path_factory.mktemp("stock")
    for name in ("vllm", patching.record.FOLDER):
        shutil.copytree(installed / name, folder / name, copy_function=os.symlink, symlinks=True)
    report = patching.revert(patching.open_tree(folder), patching.bundled_series())
    assert report.state is patching.TreeState.NOT_APPLIED
    return folder


def test_a_stock_vllm_gives_exact_signatures_and_a_state_and_names_what_is_missing(
    stock_vllm: Path, engine_environment: None, prompts: list[list[int]], reference: Any
) -> None:
    batch = prompts[:4]
    ports = free_ports(3)
    work = {
        "model": str(ROOT / "integration/testbed/model"),
        "prompts": batch,
        "ports": ports[:2],
        "tokens": STEPS + 1,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stock_engine.py"))],
        input=json.dumps(work),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(stock_vllm), str(ROOT)]),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[2]),
        },
        text=True,
        capture_output=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert not result["patched"], "the subprocess must not import the patched vLLM"
    for ids, text in zip(batch, result["signatures"], strict=True):
        signature = signature_from_text(text)
        assert signature.covered_tokens == len(ids)
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
    touched = np.zeros((STEPS, 6, 64), bool)
    for ids, output, text in zip(batch, result["outputs"], result["decode_signatures"], strict=True):
        picks = reference.picks(ids + output[:STEPS])[len(ids) :]
        touched[np.arange(STEPS)[:, None, None], np.arange(6)[None, :, None], picks] = True
        np.testing.assert_array_equal(
            signature_from_text(text).counts, reference.counts(ids + output[:STEPS], len(ids))[1]
        )
    state = result["state"]
    assert state["engine_version"].endswith("no scheduler hook")
    assert (state["running"], state["waiting"], state["kv_usage"]) == (0, 0, 0.0)
    assert (state["decode_steps"], state["decode_tokens"]) == (STEPS, STEPS * len(batch))
    assert state["batch_last"] == len(batch)
    assert state["union_last"] == pytest.approx(touched[-1].sum() / 6)
    assert 0 < state["step_time_ewma_s"] < 5
    expected = touched[0].astype(np.float64)
    for step in touched[1:]:
        expected += (step - expected) / 16
    np.testing.assert_allclose(state["hit_frequency"], expected, atol=1 / 255)
    assert "scheduler_state_hook_missing" in done.stdout + done.stderr
    assert "late_notice_patch_missing" in done.stdout + done.stderr


def test_the_connectors_own_count_of_the_queue_is_the_schedulers(
    make_engine: Callable[..., Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step, with more requests than run slots and a pool so small that some are preempted."""
    from vllm import SamplingParams

    from eldr.engine.signature_handoff import SignatureHandoff

    monkeypatch.delattr(SignatureHandoff, "create_scheduler_tap")
    engine = make_engine(
        transfer={"kv_role": "kv_consumer"},
        kv_cache_memory_bytes=1 << 22,
        max_num_seqs=8,
        scheduler_reserve_full_isl=False,
    )
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    side = scheduler.connector._scheduler_side
    assert scheduler.scheduler_tap is None
    counted: list[tuple[int, int]] = []
    own: list[tuple[int, int]] = []
    tokens: list[bool] = []
    ended = side.decode_scheduler.step_ended

    def comparing(had_tokens: bool) -> None:
        counted.append(scheduler.get_request_counts())
        own.append(side._seen.get_request_counts())
        running = {request.request_id for request in scheduler.running}
        tokens.append({request.request_id for request in side._seen.running} == running)
        ended(had_tokens)

    side.decode_scheduler.step_ended = comparing
    preempted: list[Any] = []
    preempt = scheduler._preempt_request

    def noting(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request)
        return preempt(request, *rest, **options)

    scheduler._preempt_request = noting
    decode = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    engine.generate([{"prompt_token_ids": ids} for ids in prompts[:20]], decode, use_tqdm=False)
    assert preempted, "no request was preempted"
    assert max(waiting for _, waiting in counted) > 5
    assert own == counted
    assert all(tokens)
    state = side.decode_scheduler.snapshot("d", "i", 1)
    assert (state.running, state.waiting, state.kv_usage) == (0, 0, 0.0)
