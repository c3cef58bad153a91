"""Shared storage: one engine writes the KV to a folder, the next one loads it from there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eldr.rpc.codec import signature_from_text

pytestmark = pytest.mark.engine

BLOCK = 32


@pytest.fixture
def stored(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that the connector finds again. It looks one length up with another rounding than it stores."""
    return [ids for ids in prompts[:9] if len(ids) % BLOCK != 1 and len(ids) > BLOCK + 2][:6]


def generate(engine: Any, prompts: list[list[int]], tokens: int, params: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams

    leg = SamplingParams(
        max_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params else None,
    )
    return list(engine.generate([{"prompt_token_ids": ids} for ids in prompts], leg, use_tqdm=False))


def test_a_prefill_engine_writes_and_a_decode_engine_loads(
    make_engine: Callable[..., Any], stored: list[list[int]], reference: Any, tmp_path: Path
) -> None:
    """The signature reaches the gateway though the connector gives no parameters, and the tokens are the same."""

    def engine(role: str) -> Any:
        return make_engine(
            transfer={"kv_connector": "ExampleConnector", "kv_role": role},
            extra={"shared_storage_path": str(tmp_path)},
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
        )

    producer = engine("kv_producer")
    computed = generate(producer, stored, 9, {"eldr_signature": True})
    for ids, answer in zip(stored, computed, strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        assert signature.coverage == 1.0
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
    scheduler = producer.llm_engine.engine_core.engine_core.scheduler
    side = scheduler.connector._scheduler_side
    assert (side.handoff.held, side.handoff.can_release) == (0, False)
    loaded = [(len(ids) - 2) // BLOCK * BLOCK for ids in stored]

    consumer = engine("kv_consumer")
    counted = {"eldr_decode_counts": True}
    answers = generate(consumer, stored, 9, counted)
    for ids, tokens, own, answer in zip(stored, loaded, computed, answers, strict=True):
        assert answer.num_cached_tokens == tokens
        generated = list(answer.outputs[0].token_ids)
        assert generated == list(own.outputs[0].token_ids)
        signature = signature_from_text(answer.kv_transfer_params["eldr_decode_signature"])
        np.testing.assert_array_equal(signature.counts, reference.counts(ids + generated[:-1], len(ids))[1])

    producer = engine("kv_producer")
    again = generate(producer, stored, 1, {"eldr_signature": True})
    for ids, tokens, answer in zip(stored, loaded, again, strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        assert (signature.tokens, signature.covered_tokens) == (len(ids), len(ids) - tokens)
        np.testing.assert_array_equal(signature.counts, reference.counts(ids, tokens)[1])
