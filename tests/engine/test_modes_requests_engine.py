"""Signatures are exact for requests of special kinds: several choices, adapters, ends at the first token."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import assert_exact, assert_exact_cold_and_hit, prefill, scheduler_side_of, signature_of

pytestmark = pytest.mark.engine

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine(max_num_batched_tokens=2048, extra={"kv_lease_duration": 1})


def test_every_choice_of_a_prompt_has_the_prompts_signature(
    engine: Any, prompts: list[list[int]], reference: Any
) -> None:
    """n > 1: each choice is a request of its own to the engine, and all but the first hit the prefix cache."""
    side = scheduler_side_of(engine)
    before = side.handoff.counters.signatures
    answers = prefill(engine, prompts[:4], n=3, temperature=0.9, seed=1)
    assert_exact(answers, prompts[:4], reference)
    assert side.handoff.counters.signatures == before + 12
    assert side.handoff.counters.missing_signatures == 0


def test_decode_counts_of_several_choices_are_those_of_one_of_them(
    engine: Any, prompts: list[list[int]], reference: Any
) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=3,
        max_tokens=12,
        temperature=0.9,
        seed=5,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_decode_counts": True}},
    )
    ids = prompts[5]
    (answer,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    counted = signature_of(answer, "eldr_decode_signature")
    texts = [ids + list(choice.token_ids)[:-1] for choice in answer.outputs]
    assert len({tuple(text) for text in texts}) == 3
    expected = [reference.counts(text, len(ids))[1] for text in texts]
    assert [np.array_equal(counted.counts, counts) for counts in expected].count(True) == 1
    assert not scheduler_side_of(engine)._counts._tracked


def test_a_request_that_ends_at_its_first_token_has_its_signature(
    engine: Any, prompts: list[list[int]], reference: Any
) -> None:
    """Cases 1.13 and 1.14: by length, and by a stop token, with nothing left for a decoder to do."""
    ids = prompts[8]
    (by_length,) = prefill(engine, [ids])
    first = by_length.outputs[0].token_ids[0]
    assert by_length.outputs[0].finish_reason == "length"
    (stopped,) = prefill(engine, [ids], max_tokens=5, stop_token_ids=[first])
    assert stopped.outputs[0].finish_reason == "stop"
    assert_exact([by_length, stopped], [ids, ids], reference)


def test_a_signature_is_of_the_prompt_and_not_of_the_blocks_that_are_sent(
    engine: Any, prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.16: the decoder may hold the first blocks itself; a token selects the same experts wherever it ran."""
    ids = (prompts[9] * 4)[:96]
    (cold,) = prefill(engine, [ids])
    (hit,) = prefill(engine, [ids])
    assert hit.num_cached_tokens == 64
    assert_exact([cold, hit], [ids, ids], reference)
    tail = reference.counts(ids, 64)[1]
    assert (signature_of(hit).counts >= tail).all()
    assert signature_of(hit).counts.sum() > tail.sum()


def test_prompts_of_adapters_and_of_the_base_model_have_each_their_own_signature(
    make_engine: Callable[..., Any],
    prompts: list[list[int]],
    reference: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LoRA on the attention of a MoE model. Blocks of one adapter are never hit by another."""
    import torch
    from router_reference import RouterReference
    from safetensors.torch import save_file
    from tiny_models import TESTBED_MODEL
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

    adapted = RouterReference(TESTBED_MODEL)
    draw, weights = torch.Generator().manual_seed(0), {}
    for layer in adapted.layers:
        for name in ("q_proj", "v_proj"):
            module = f"model.layers.{layer}.self_attn.{name}"
            parameter = adapted.parameter(f"{module}.weight")
            down = 0.1 * torch.randn(RANK, parameter.shape[1], generator=draw)
            up = 0.1 * torch.randn(parameter.shape[0], RANK, generator=draw)
            weights[f"base_model.model.{module}.lora_A.weight"] = down
            weights[f"base_model.model.{module}.lora_B.weight"] = up
            parameter.data += ALPHA / RANK * up @ down
    save_file(weights, tmp_path / "adapter_model.safetensors")
    configuration = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(configuration))

    def without_adapters_on_experts(moe_config: Any) -> Any:
        # With LoRA on, vLLM wants a MoE kernel that can take adapters, of which its CPU build has none.
        return select_unquantized_moe_backend(dataclasses.replace(moe_config, is_lora_enabled=False))

    monkeypatch.setattr(
        unquantized_fused_moe_method, "select_unquantized_moe_backend", without_adapters_on_experts
    )
    engine = make_engine(
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["q_proj", "v_proj", "qkv_proj"],
        extra={"kv_lease_duration": 1},
    )
    wave = prompts[:4]
    adapter = LoRARequest("adapter", 1, str(tmp_path))
    assert any((adapted.counts(ids)[0] != reference.counts(ids)[0]).any() for ids in wave)
    assert_exact(prefill(engine, wave, lora_request=adapter), wave, adapted)
    assert_exact_cold_and_hit(engine, wave, reference)
    again = prefill(engine, wave, lora_request=adapter)
    assert_exact(again, wave, adapted)
    assert all(answer.num_cached_tokens for answer in again)
