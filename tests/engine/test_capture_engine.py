"""Capture in the real engine: what bypasses the hook shows as missing; ranks' reports join."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eldr.rpc.codec import signature_from_text

pytestmark = pytest.mark.engine

PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def prefill(engine: Any, ids: list[int]) -> Any:
    from vllm import SamplingParams

    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(PREFILL_LEG)})
    return engine.generate([{"prompt_token_ids": ids}], leg, use_tqdm=False)[0].kv_transfer_params


def test_a_layer_that_bypasses_the_hook_gives_no_signature_until_its_blocks_are_gone(
    make_engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    """Case 1.6: never zeros of the right shape."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = make_engine(extra={"kv_lease_duration": 1})
    capturer = get_kv_transfer_group()._worker.capturer
    side = engine.llm_engine.engine_core.engine_core.scheduler.connector._scheduler_side
    assert signature_from_text(prefill(engine, prompts[0])["eldr_signature"]).coverage == 1.0
    from eldr.engine.capture import target_moe_layers

    router = target_moe_layers(engine.llm_engine.vllm_config)[3].router
    hook = router.capture_fn
    router.set_capture_fn(None)
    assert prefill(engine, prompts[1])["eldr_signature"] is None
    assert side.handoff.counters.missing_signatures == 1
    router.set_capture_fn(hook)
    assert prefill(engine, prompts[1])["eldr_signature"] is None, "blocks in the prefix cache stay unknown"
    assert signature_from_text(prefill(engine, prompts[2])["eldr_signature"]).coverage == 1.0
    assert capturer.layers == (0, 1, 2, 3, 4, 5)


def test_blocks_filled_from_elsewhere_are_uncovered_and_said(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Cases 1.1 and 1.17: a prompt whose first block's row is unknown keeps the rest and says its coverage."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = make_engine(extra={"kv_lease_duration": 1})
    ids = next(p for p in prompts if len(p) > 150)
    first = prefill(engine, ids)
    cached = first["remote_block_ids"][0]
    get_kv_transfer_group()._worker.cache.forget([cached[0]])
    signature = signature_from_text(prefill(engine, ids)["eldr_signature"])
    assert (signature.tokens, signature.covered_tokens) == (len(ids), len(ids) - 32)
    whole, block = reference.counts(ids)[0], reference.counts(ids, 32)[0]
    np.testing.assert_array_equal(signature.counts, whole - block)


def test_the_refused_pair_of_capture_users_is_named(make_engine: Callable[..., Any]) -> None:
    from types import SimpleNamespace

    from eldr.engine.capture import CaptureError, Capturer

    config = SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=True))
    with pytest.raises(CaptureError, match="--enable-return-routed-experts"):
        Capturer(config)


def test_reports_of_two_pipeline_ranks_join_by_layer_whatever_their_order() -> None:
    """Case 1.18."""
    from eldr.engine.report import StepReport

    def report(layers: tuple[int, ...]) -> StepReport:
        rows = np.array([[layer, layer + 100] for layer in layers], np.int32)
        return StepReport(
            layers=layers,
            decode_tokens=2,
            counts={"a": rows},
            union=np.array([[layer & 1, layer & 2] for layer in layers], np.bool_),
            picks={"b": np.stack([rows, rows])},
            misses=1,
        )

    for joined in (
        report((0, 2)).joined(report((1, 3))),
        report((1, 3)).joined(report((0, 2))),
    ):
        assert joined.layers == (0, 1, 2, 3)
        assert joined.counts["a"][:, 0].tolist() == [0, 1, 2, 3]
        assert joined.union is not None
        assert joined.union.astype(int).tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
        assert joined.picks["b"][1, :, 0].tolist() == [0, 1, 2, 3]
        assert (joined.decode_tokens, joined.misses) == (2, 2)


def test_step_unions_and_decode_counts_equal_the_reference(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Eight requests decode together; each step's union is that of the tokens it ran, counted independently."""
    from vllm import SamplingParams

    engine = make_engine(max_num_batched_tokens=2048)
    side = engine.llm_engine.engine_core.engine_core.scheduler.connector._scheduler_side
    unions: list[Any] = []
    reported = side.reported

    def recording(report: Any, sent: set[str], expired: frozenset[str]) -> None:
        if report is not None and report.union is not None:
            assert report.decode_tokens == 8
            unions.append(report.union)
        reported(report, sent, expired)

    side.reported = recording
    batch, steps = prompts[20:28], 19
    decode = SamplingParams(
        max_tokens=steps + 1,
        temperature=0.8,
        seed=7,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_decode_counts": True}},
    )
    answers = engine.generate([{"prompt_token_ids": ids} for ids in batch], decode, use_tqdm=False)
    assert len(unions) == steps
    expected = np.zeros((steps, 6, 64), bool)
    for ids, answer in zip(batch, answers, strict=True):
        generated = list(answer.outputs[0].token_ids)[:steps]
        picks = reference.picks(ids + generated)[len(ids) :]
        for step in range(steps):
            expected[step, np.arange(6)[:, None], picks[step]] = True
        counted = signature_from_text(answer.kv_transfer_params["eldr_decode_signature"])
        assert counted.tokens == steps
        np.testing.assert_array_equal(counted.counts, reference.counts(ids + generated, len(ids))[1])
    np.testing.assert_array_equal(np.array(unions), expected)
