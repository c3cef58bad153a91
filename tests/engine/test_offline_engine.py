"""An offline engine counts what the reference counts, and sums what the reference's gate gives."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "integration/testbed/model"
ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    # 24 blocks of 96 KiB, so that requests that decode together preempt each other.
    "kv_cache_memory_bytes": 24 * 96 << 10,
}
TOKENS = 40


@pytest.fixture(scope="module")
def offline(engine_environment: None) -> Iterator[Any]:
    from eldr.engine.offline import OfflineEngine

    engine = OfflineEngine(str(MODEL), in_flight=6, gate=True, arguments=ARGUMENTS)
    yield engine
    engine.close()


def requests(prompts: list[list[int]], max_tokens: int = TOKENS) -> list[Any]:
    from eldr.engine.offline import OfflineRequest

    return [OfflineRequest(str(i), ids, max_tokens, 0.0, i, True) for i, ids in enumerate(prompts)]


def test_both_legs_of_every_prompt_equal_the_reference(
    offline: Any, prompts: list[list[int]], reference: Any
) -> None:
    """Twelve prompts, six at a time, some of them preempted; the second run meets blocks in the prefix cache."""
    scheduler = offline._engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def recording(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *rest, **options)

    scheduler._preempt_request = recording
    batch = prompts[30:42]
    for _ in range(2):
        found = {counts.id: counts for counts in offline.run(requests(batch))}
        assert sorted(found, key=int) == [str(i) for i in range(len(batch))]
        for i, ids in enumerate(batch):
            np.testing.assert_array_equal(found[str(i)].prefill.counts, reference.counts(ids)[0])
            assert found[str(i)].prefill.tokens == len(ids)
    assert preempted, "the pool is too large for this test"
    generated = greedy(offline, batch)
    for i, ids in enumerate(batch):
        decode = found[str(i)].decode
        assert decode.tokens == TOKENS - 1
        np.testing.assert_array_equal(
            decode.counts, reference.counts(ids + generated[i][: TOKENS - 1], len(ids))[1]
        )


def greedy(offline: Any, batch: list[list[int]]) -> list[list[int]]:
    """What the engine generates, asked for in the ordinary way."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    answers = offline._llm.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def test_a_request_of_one_token_has_its_prompt_counts_and_no_decode_counts(
    offline: Any, prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.14."""
    (counts,) = offline.run(requests(prompts[50:51], max_tokens=1))
    np.testing.assert_array_equal(counts.prefill.counts, reference.counts(prompts[50])[0])
    assert counts.decode is None


def test_gate_sums_equal_the_reference(offline: Any, prompts: list[list[int]], reference: Any) -> None:
    """Also for a prompt whose blocks are in the prefix cache already."""
    for ids in (prompts[30], prompts[60], prompts[60]):
        probability, logit = offline.gate_sums(ids)
        expected_probability, expected_logit = reference.gate_sums(ids)
        assert probability.dtype == logit.dtype == np.float32
        np.testing.assert_allclose(probability, expected_probability, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logit, expected_logit, rtol=1e-4, atol=2e-3)
        np.testing.assert_allclose(probability.sum(1), len(ids), rtol=1e-5)
    assert offline.scoring == "softmax"


def test_after_a_gate_run_counts_are_still_those_of_the_reference(
    offline: Any, prompts: list[list[int]], reference: Any
) -> None:
    offline.gate_sums(prompts[70])
    (counts,) = offline.run(requests(prompts[70:71]))
    np.testing.assert_array_equal(counts.prefill.counts, reference.counts(prompts[70])[0])


def test_gate_sums_of_a_layer_that_missed_a_token_are_refused(offline: Any, prompts: list[list[int]]) -> None:
    from eldr.engine.gate_capture import GateError

    capture = offline._gate
    router = capture._routers[2]
    hook = router.select_experts
    del router.select_experts
    try:
        with pytest.raises(
            GateError, match=f"MoE layer number 2 saw 0 tokens of a prompt of {len(prompts[3])}"
        ):
            offline.gate_sums(prompts[3])
    finally:
        router.select_experts = hook


@pytest.mark.parametrize(
    ("gate", "arguments", "message"),
    [
        (False, {"kv_transfer_config": {}}, "kv_transfer_config: set by eldr"),
        (True, {"enforce_eager": False}, "gate sums need an eager engine"),
    ],
)
def test_arguments_that_would_change_what_is_counted_are_refused(
    engine_environment: None, gate: bool, arguments: dict[str, Any], message: str
) -> None:
    from eldr.engine.offline import OfflineEngine, OfflineError

    with pytest.raises(OfflineError, match=message):
        OfflineEngine(str(MODEL), in_flight=1, gate=gate, arguments=arguments)


def test_the_verb_writes_the_counts_and_gate_sums_of_the_reference(
    engine_environment: None, reference: Any, tmp_path: Path
) -> None:
    """`eldr calibrate --offline`, in a process of its own, on calibration prompts of several domains."""
    from transformers import AutoTokenizer

    from eldr.calibration.counts_file import load_counts

    lines = (ROOT / "integration/testbed/prompts/calibration.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines[::130]]
    path, out = tmp_path / "prompts.jsonl", tmp_path / "counts.npz"
    path.write_text("\n".join(json.dumps(prompt) for prompt in prompts), encoding="utf-8")
    words = ["calibrate", str(path), "--out", str(out), "--offline", str(MODEL), "--gate"]
    words += ["--output-tokens", "6", "--prompt-tokens", "120", "--in-flight", "3"]
    words += [f"--engine-arg={name}={value}" for name, value in ARGUMENTS.items()]
    held_out = ROOT / "integration/testbed/prompts/evaluation.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "eldr.cli.main", *words, "--held-out", str(held_out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"wrote {out}: {len(prompts)} requests" in done.stdout
    for domain in {prompt["domain"] for prompt in prompts}:
        assert domain in done.stdout
    counts = load_counts(out)
    assert counts.ids == tuple(prompt["id"] for prompt in prompts)
    assert counts.moe_layers == (0, 1, 2, 3, 4, 5)
    assert counts.decode_tokens.tolist() == [5] * len(prompts)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for row, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt["text"])[-120:]
        np.testing.assert_array_equal(counts.prefill_counts[row], reference.counts(ids)[0])
        probability, logit = reference.gate_sums(ids)
        np.testing.assert_allclose(counts.gate_probability[row], probability, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(counts.gate_logit[row], logit, rtol=1e-4, atol=2e-3)
