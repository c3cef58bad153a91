"""Signatures are exact on architectures whose layers, KV groups, routers or prompt lengths differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import assert_exact, assert_exact_cold_and_hit, prefill, scheduler_side_of, signature_of
from router_reference import RouterReference
from tiny_models import tiny_model

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("architecture", "moe_layers"),
    [("qwen3_moe", (1, 3)), ("qwen2_moe", (0, 1, 2, 3))],
    ids=["dense_first_layers", "shared_experts"],
)
def test_dense_layers_and_shared_experts_leave_no_rows(
    architecture: str,
    moe_layers: tuple[int, ...],
    make_engine: Callable[..., Any],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path, architecture)
    reference = RouterReference(model)
    engine = make_engine(model=str(model), max_num_batched_tokens=64, extra={"kv_lease_duration": 1})
    assert reference.layers == moe_layers
    assert scheduler_side_of(engine)._info.geometry.moe_layers == moe_layers
    assert_exact_cold_and_hit(engine, prompts[:6], reference)


def test_the_full_attention_group_of_a_hybrid_model_is_followed_wherever_it_stands(
    make_engine: Callable[..., Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Case 1.3. Sliding-window layers in groups of their own free blocks that the signature still needs."""
    model = tiny_model(tmp_path, "afmoe")
    reference = RouterReference(model)
    engine = make_engine(
        model=str(model),
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=3 << 20,
        extra={"kv_lease_duration": 1},
    )
    groups = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    assert kinds.count("FullAttentionSpec") == 1
    assert "SlidingWindowSpec" in kinds
    wave = [*prompts[:5], prompts[7] + prompts[12]]
    assert max(map(len, wave)) > 4 * 64
    assert_exact_cold_and_hit(engine, wave, reference)
    # More than the pool holds, so that blocks change hands between the groups.
    for start in range(20, 44, 4):
        assert_exact(prefill(engine, prompts[start : start + 4]), prompts[start : start + 4], reference)
    assert_exact(prefill(engine, wave), wave, reference)


@pytest.mark.parametrize("block_size", [96, 224])
def test_a_block_size_that_is_no_power_of_two_is_exact(
    block_size: int, make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """The CPU build takes multiples of 32 alone; 32, 64, 128 and 256 stand in other tests."""
    engine = make_engine(block_size=block_size, max_num_batched_tokens=80, extra={"kv_lease_duration": 1})
    assert_exact_cold_and_hit(engine, prompts[10:16], reference)


def test_a_prompt_of_40000_tokens_is_exact_beyond_16_bits(
    make_engine: Callable[..., Any], tmp_path: Path
) -> None:
    """One expert is selected by every token, which no signed 16-bit count or position would hold."""
    model = tiny_model(
        tmp_path,
        "afmoe",
        favourite=5,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        global_attn_every_n_layers=2,
        max_position_embeddings=40960,
    )
    engine = make_engine(
        model=str(model),
        max_model_len=40960,
        max_num_batched_tokens=2048,
        block_size=128,
        kv_cache_memory_bytes=1 << 26,
        extra={"kv_lease_duration": 1},
    )
    ids = np.random.default_rng(0).integers(10, 8000, 40_000).tolist()
    reference = RouterReference(model, chunk=1000)
    (answer,) = prefill(engine, [ids])
    assert_exact([answer], [ids], reference)
    assert (signature_of(answer).counts[:, 5] == 40_000).all()
    (again,) = prefill(engine, [ids])
    np.testing.assert_array_equal(signature_of(again).counts, signature_of(answer).counts)
    assert again.num_cached_tokens > 39_000
