"""The worker's half of capture: slots without a slot mapping, and reports that are still on their way."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eldr.engine.kernels.slots import batch_slots
from eldr.engine.report import PendingReport, StepReport, WorkerMetadata
from eldr.engine.step import Span
from eldr.rpc.codec import signature_from_text

pytestmark = pytest.mark.engine

PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False}


def test_slots_follow_the_order_of_the_batch() -> None:
    spans = {"a": Span(6, 4, [3, 9]), "b": Span(0, 1, [5]), "c": Span(8, 5, [2, 7])}
    slots = batch_slots(["c", "a", "b"], spans, 4)
    assert slots is not None
    assert slots.tolist() == [8, 9, 10, 11, 28, 14, 15, 36, 37, 20]
    expected = np.concatenate([spans[name].slots(4) for name in "cab"])
    np.testing.assert_array_equal(slots, expected)


def test_a_batch_with_a_request_that_was_not_planned_has_no_slots() -> None:
    assert batch_slots(["a", "b"], {"a": Span(0, 1, [0])}, 4) is None
    empty = batch_slots([], {}, 4)
    assert empty is not None
    assert empty.size == 0


class Arrival:
    """A report that says when it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def __call__(self) -> StepReport:
        self.waits += 1
        return StepReport(
            (0, 1), 3, counts={"a": np.ones((2, 4), np.int32)}, union=np.zeros((2, 1), np.uint8)
        )


def test_a_pending_report_is_waited_for_when_its_metadata_is_pickled_and_not_before() -> None:
    arrival = Arrival()
    metadata = WorkerMetadata(PendingReport(arrival), None)
    assert arrival.waits == 0
    sent = pickle.loads(pickle.dumps(metadata))
    assert arrival.waits == 1
    assert isinstance(sent, WorkerMetadata)
    assert isinstance(sent.report, StepReport)
    assert sent.report.counts["a"].tolist() == np.ones((2, 4)).tolist()
    assert sent.report.decode_tokens == 3
    pickle.dumps(metadata)
    assert arrival.waits == 1


def test_a_pending_report_is_waited_for_when_worker_and_scheduler_share_a_process() -> None:
    arrival = Arrival()
    metadata = WorkerMetadata(PendingReport(arrival), None)
    joined = metadata.aggregate(WorkerMetadata(None, None))
    assert joined.report is not None
    assert joined.report.decode_tokens == 3
    assert joined.report is metadata.report
    assert arrival.waits == 1


class Late:
    """A reducer like the numpy one, whose results are there only when somebody waits for them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.unread = 0

    def reduce(self, work: Any) -> Any:
        pending, late = self.inner.reduce(work), self
        late.unread += len(work.ids) > 0

        class Results:
            done = False

            def result(self) -> Any:
                late.unread -= 1
                return pending.result()

        return Results()


def worker_of(engine: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def test_signatures_are_exact_when_results_arrive_late(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    from vllm import SamplingParams

    engine = make_engine(max_num_batched_tokens=64, extra={"kv_lease_duration": 1})
    worker = worker_of(engine)
    worker._reducer = late = Late(worker._reducer)
    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(PREFILL_LEG)})
    wave = prompts[:6]
    answers = engine.generate([{"prompt_token_ids": ids} for ids in wave], leg, use_tqdm=False)
    for ids, answer in zip(wave, answers, strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
    assert late.unread == 0


def as_model_runner_v2(engine: Any, compare: list[int]) -> None:
    """Makes an engine of Model Runner V1 plan spans, and its worker work as on V2: with the order of the batch alone.

    V1's own slot mapping of every step is compared with the slots so derived; `compare` collects the tokens.
    """
    worker, core = worker_of(engine), core_of(engine)
    core.scheduler.connector._scheduler_side._needs_spans = True
    runner = core.model_executor.driver_worker.worker.model_runner
    note, finish = worker.note_forward, worker.finish_step
    mappings: list[Any] = []

    def note_forward(context: Any, kwargs: dict[str, Any]) -> None:
        mapping = context.slot_mapping[worker._attention_layer] if context.slot_mapping else torch.empty(0)
        mappings.append(mapping)
        order = list(runner.input_batch.req_ids)
        note(None, {"request_ids": order, "num_tokens": int((mapping >= 0).sum())})

    def finish_step(plan: Any) -> Any:
        if plan.tokens:
            derived = worker._batch.slots(plan, worker._block_size)
            np.testing.assert_array_equal(derived, mappings[-1][: plan.tokens].numpy())
            compare.append(plan.tokens)
        return finish(plan)

    worker.note_forward, worker.finish_step = note_forward, finish_step


def test_slots_derived_for_model_runner_v2_are_those_of_v1_chunked_mixed_and_preempted(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """V1's own mapping is the truth; signatures and decode counts come out exact with the derived slots alone."""
    from vllm import SamplingParams

    engine = make_engine(
        block_size=32,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 22,
        extra={"kv_lease_duration": 1},
        scheduler_reserve_full_isl=False,
    )
    compared: list[int] = []
    as_model_runner_v2(engine, compared)
    scheduler = core_of(engine).scheduler
    preempted: list[Any] = []
    preempt = scheduler._preempt_request

    def recording(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request)
        return preempt(request, *rest, **options)

    scheduler._preempt_request = recording
    wave = prompts[60:76]
    background = [p[:60] for p in prompts[:8]]
    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(PREFILL_LEG)})
    decode = SamplingParams(
        max_tokens=150,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_decode_counts": True}},
    )
    answers = engine.generate(
        [{"prompt_token_ids": ids} for ids in [*background, *wave]],
        [decode] * len(background) + [leg] * len(wave),
        use_tqdm=False,
    )
    assert preempted, "nothing was preempted"
    assert sum(compared) > sum(map(len, wave))
    for ids, answer in zip(wave, answers[len(background) :], strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
    for ids, answer in list(zip(background, answers, strict=False))[:2]:
        generated = list(answer.outputs[0].token_ids)[:-1]
        counted = signature_from_text(answer.kv_transfer_params["eldr_decode_signature"])
        np.testing.assert_array_equal(counted.counts, reference.counts(ids + generated, len(ids))[1])
