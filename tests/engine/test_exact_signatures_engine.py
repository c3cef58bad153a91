"""Signatures of the real engine equal, count for count, those of an independent float32 reference."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from eldr.cluster.ports import free_ports
from eldr.rpc.codec import signature_from_text
from eldr.signature import ExpertSignature
from eldr.v1 import prefill_pb2, prefill_pb2_grpc

pytestmark = pytest.mark.engine

PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """The prefill leg of every prompt, all at once; the answers in order."""
    from vllm import SamplingParams

    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(PREFILL_LEG)})
    return list(engine.generate([{"prompt_token_ids": ids} for ids in prompts], leg, use_tqdm=False))


def signatures(answers: list[Any]) -> list[ExpertSignature]:
    return [signature_from_text(answer.kv_transfer_params["eldr_signature"]) for answer in answers]


def assert_exact(found: list[ExpertSignature], prompts: list[list[int]], reference: Any) -> None:
    for signature, ids in zip(found, prompts, strict=True):
        (expected,) = reference.counts(ids)
        np.testing.assert_array_equal(signature.counts, expected)
        assert signature.tokens == signature.covered_tokens == len(ids)
        assert (signature.counts.sum(axis=1) == len(ids) * reference.top_k).all()


@pytest.mark.parametrize("block_size", [32, 64, 256])
def test_cold_and_prefix_hit_signatures_are_exact_under_chunked_prefill(
    block_size: int, make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.13: the same through the prefill role as through one pass over the whole prompt."""
    engine = make_engine(
        block_size=block_size, max_num_batched_tokens=64, extra={"kv_lease_duration": 1}, max_num_seqs=8
    )
    shared = prompts[0] + prompts[1]
    wave = [*prompts[:12], shared[:280], shared[:400]]
    cold = prefill(engine, wave)
    assert_exact(signatures(cold), wave, reference)
    again = prefill(engine, wave)
    assert_exact(signatures(again), wave, reference)
    hits = sum(answer.num_cached_tokens for answer in again)
    assert hits >= sum(len(ids) // block_size * block_size for ids in wave) * 0.5 or block_size == 256
    assert block_size == 256 or hits > 0


def test_signatures_stay_exact_after_eviction_and_reuse_of_blocks(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    # 6 layers * 2 heads * 32 * 2 (K and V) * 4 bytes = 3 KiB a token: this pool holds about 1,300 tokens.
    engine = make_engine(
        block_size=32,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=1 << 22,
        extra={"kv_lease_duration": 1},
    )
    blocks = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    order = [*range(40), *range(0, 40, 3), *range(20)]
    assert sum(len(prompts[i]) for i in order) > 3 * blocks * 32
    for start in range(0, len(order), 4):
        wave = [prompts[i] for i in order[start : start + 4]]
        assert_exact(signatures(prefill(engine, wave)), wave, reference)


def test_signatures_stay_exact_after_preemption(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.12: a preempted and resumed prompt gives the same signature as an undisturbed one."""
    from vllm import SamplingParams

    engine = make_engine(
        block_size=32,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 22,
        extra={"kv_lease_duration": 1},
        scheduler_reserve_full_isl=False,
    )

    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted: list[Any] = []
    preempt = scheduler._preempt_request

    def recording(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request)
        return preempt(request, *rest, **options)

    scheduler._preempt_request = recording
    wave = prompts[60:76]
    requests = [{"prompt_token_ids": ids} for ids in [*(p[:60] for p in prompts[:8]), *wave]]
    background = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(PREFILL_LEG)})
    answers = engine.generate(requests, [background] * 8 + [leg] * len(wave), use_tqdm=False)
    assert any(request.kv_transfer_params for request in preempted), "no prefill leg was preempted"
    assert_exact(signatures(answers[8:]), wave, reference)


def test_a_released_transfer_frees_its_blocks_at_once_and_only_once(
    make_engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    """Case 2.2: the hand-off that no decoder will pull is released explicitly, not by its lease."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    engine = make_engine(eldr={"grpc_listen": address})
    answers = prefill(engine, prompts[:3])
    with grpc.insecure_channel(address) as channel:
        worker = prefill_pb2_grpc.PrefillServiceStub(channel)
        info = worker.GetInfo(prefill_pb2.PrefillServiceGetInfoRequest())
        assert info.held_transfers == 3
        transfers = [answer.kv_transfer_params["remote_request_id"] for answer in answers]
        stored = worker.GetSignature(prefill_pb2.GetSignatureRequest(transfer_id=transfers[0]))
        assert stored.signature.tokens == len(prompts[0])
        stale = prefill_pb2.ReleaseTransferRequest(transfer_id=transfers[0], incarnation="another process")
        assert not worker.ReleaseTransfer(stale).released
        for transfer_id in transfers:
            request = prefill_pb2.ReleaseTransferRequest(
                transfer_id=transfer_id, incarnation=info.info.incarnation
            )
            assert worker.ReleaseTransfer(request).released
        # In this in-process engine steps run only inside generate(); a server steps while transfers are held.
        from vllm import SamplingParams

        engine.generate(
            [{"prompt_token_ids": prompts[5]}], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        info = worker.GetInfo(prefill_pb2.PrefillServiceGetInfoRequest())
        assert info.held_transfers == 0
        assert info.kv_usage == 0.0
        assert not worker.ReleaseTransfer(
            prefill_pb2.ReleaseTransferRequest(transfer_id=transfers[0])
        ).released
