"""KV that comes back from host memory: said as uncovered, the rest exact (case 1.1)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eldr.rpc.codec import signature_from_text

pytestmark = pytest.mark.engine

SIGNATURE_ONLY = {"eldr_signature": True}
BLOCK = 32
HOST = {"cpu_bytes_to_use": 1 << 26, "spec_name": "HostCopiesSpec", "spec_module_path": "host_copies"}


def prefill(engine: Any, prompts: list[list[int]], params: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams

    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(params)})
    return list(engine.generate([{"prompt_token_ids": ids} for ids in prompts], leg, use_tqdm=False))


def test_reloaded_blocks_are_uncovered_and_the_rest_equals_the_reference(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """A prompt is evicted from the device, others use its blocks, and it comes back from the host."""
    engine = make_engine(
        transfer={"kv_connector": "OffloadingConnector"}, extra=HOST, kv_cache_memory_bytes=1 << 22
    )
    first = prompts[:6]
    for ids, answer in zip(first, prefill(engine, first, SIGNATURE_ONLY), strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        assert signature.coverage == 1.0
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
    for start in range(6, 60, 6):
        prefill(engine, prompts[start : start + 6], SIGNATURE_ONLY)
    reloaded = 0
    for ids, answer in zip(first, prefill(engine, first, SIGNATURE_ONLY), strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        uncovered = len(ids) - signature.covered_tokens
        print(len(ids), uncovered, answer.num_cached_tokens)
        assert uncovered % BLOCK == 0
        np.testing.assert_array_equal(signature.counts, reference.counts(ids, uncovered)[1] if uncovered else reference.counts(ids)[0])
        reloaded += uncovered
    assert reloaded > 0
