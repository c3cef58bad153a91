"""Signatures are exact, and stay what they are, where ranks share the model: TP, PP, EP and EPLB with replicas."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import assert_exact, assert_exact_cold_and_hit, prefill, scheduler_side_of, signature_of
from router_reference import RouterReference
from tiny_models import tiny_model

pytestmark = pytest.mark.engine

EXPERTS, LAYERS, REDUNDANT = 16, 2, 8


def test_two_tensor_parallel_ranks_give_one_exact_signature(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    engine = make_engine(tensor_parallel_size=2, max_num_batched_tokens=96, extra={"kv_lease_duration": 1})
    assert_exact_cold_and_hit(engine, prompts[:8], reference)
    assert scheduler_side_of(engine).handoff.counters.missing_signatures == 0


def test_pipeline_stages_give_one_exact_signature_of_all_layers(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.18. Two steps are under way at a time here."""
    engine = make_engine(
        pipeline_parallel_size=2,
        worker_cls="cpu_pp.PipelineWorker",
        max_num_batched_tokens=96,
        extra={"kv_lease_duration": 1},
    )
    assert scheduler_side_of(engine)._info.geometry.moe_layers == tuple(range(6))
    assert_exact_cold_and_hit(engine, prompts[:8], reference)


def plan_of(seed: int) -> dict[str, list[int]]:
    """Random slots of every layer: each expert once, and REDUNDANT replicas."""
    rng = np.random.default_rng(seed)
    spare = rng.integers(0, EXPERTS, REDUNDANT)
    return {str(layer): rng.permutation([*range(EXPERTS), *spare]).tolist() for layer in range(LAYERS)}


def test_signatures_and_outputs_stay_the_same_under_replicas_and_pushed_plans(
    make_engine: Callable[..., Any],
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cases 1.5 and 6.5. A plan that has reached one rank only is not applied; then both apply it at one step."""
    import cpu_ep

    model = tiny_model(
        tmp_path / "model", "qwen3_moe", num_hidden_layers=LAYERS, mlp_only_layers=[], num_experts=EXPERTS
    )
    reference = RouterReference(model)
    cpu_ep.allow_eplb(monkeypatch)
    monkeypatch.setenv(cpu_ep.PLANS, str(tmp_path))
    engine = make_engine(
        model=str(model),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={
            "num_redundant_experts": REDUNDANT,
            "use_async": False,
            "step_interval": 2,
            "window_size": 2,
            "communicator": "torch_gloo",
        },
        worker_cls="cpu_ep.ExpertParallelWorker",
        extra={"kv_lease_duration": 1},
    )
    wave = prompts[:4]
    plans: dict[str, dict[str, list[int]]] = {}

    def push(version: int, rank: int) -> None:
        plans.setdefault(str(version), plan_of(version))
        (tmp_path / f"{rank}.json").write_text(json.dumps(plans))

    def placed(salt: str) -> tuple[list[Any], list[int], list[int]]:
        """The wave without prefix hits, then the applied version and layer 0's slots, which all ranks share."""
        answers = prefill(engine, wave, salt, logprobs=20)
        assert_exact(answers, wave, reference)
        assert not any(answer.num_cached_tokens for answer in answers)
        states = engine.collective_rpc(cpu_ep.placement_of)
        assert states[0] == states[1]
        return answers, *states[0]

    def far(answers: list[Any]) -> float:
        """Largest difference of log-probabilities of the first token from those under no plan."""
        pairs = [
            (dict(before.outputs[0].logprobs[0]), dict(after.outputs[0].logprobs[0]))
            for before, after in zip(unplanned, answers, strict=True)
        ]
        return max(
            abs(before[token].logprob - after[token].logprob)
            for before, after in pairs
            for token in before.keys() & after.keys()
        )

    unplanned, version, slots = placed("none")
    assert version == 0
    push(1, rank=0)
    answers, version, still = placed("late")
    assert (version, still) == (0, slots)
    push(1, rank=1)
    placed("arriving")
    answers, version, moved = placed("everywhere")
    assert version == 1
    assert moved == plans["1"]["0"]
    assert far(answers) < 1e-4
    push(2, rank=0)
    push(2, rank=1)
    placed("second")
    answers, version, _ = placed("everywhere again")
    assert version == 2
    assert far(answers) < 1e-4
    for before, after in zip(unplanned, answers, strict=True):
        assert signature_of(after).counts.shape == (LAYERS, EXPERTS)
        np.testing.assert_array_equal(signature_of(after).counts, signature_of(before).counts)
