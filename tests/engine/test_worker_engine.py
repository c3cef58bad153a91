"""The worker's half of capture: slots without a slot mapping, and reports that are still on their way."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eldr.engine.kernels.slots import batch_slots
from eldr.engine.report import PendingReport, StepReport, WorkerMetadata
from eldr.engine.step import Span, StepPlan
from eldr.engine.worker import CaptureWorker
from eldr.rpc.codec import signature_from_text
from eldr.rpc.worker_info import WorkerRole

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
            (0, 1), 3, counts={"a": np.ones((2, 4), np.int32)}, union=np.zeros((2, 4), np.bool_)
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


class StubCapturer:
    """What CaptureWorker uses of a capturer: four tokens' picks of two layers."""

    def __init__(self, _config: Any) -> None:
        self.layers, self.experts, self.top_k = (1, 3), 10, 2
        self.device_buffer = torch.full((8, 2, 2), -1, dtype=torch.int32)
        self.ids = np.arange(16, dtype=np.int32).reshape(4, 2, 2) % 10
        self.cleared = self.misses = 0
        self.capture()

    def capture(self) -> None:
        self.device_buffer[:4] = torch.from_numpy(self.ids)

    def picks(self, tokens: int) -> torch.Tensor:
        return self.device_buffer[:tokens]

    def clear(self, tokens: int) -> None:
        self.device_buffer[:tokens] = -1
        self.cleared += tokens

    def begin_step(self) -> None:
        self.misses = 0

    def take_misses(self) -> int:
        misses, self.misses = self.misses, 0
        return misses


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CaptureWorker]:
    def make(role: WorkerRole = WorkerRole.PREFILL, first_rank: bool = True) -> CaptureWorker:
        group = SimpleNamespace(layer_name="attn", block_size=4)
        monkeypatch.setattr("eldr.engine.worker.capturer_for", StubCapturer)
        monkeypatch.setattr("eldr.engine.worker.signature_group", lambda _config: group)
        monkeypatch.setattr(
            "eldr.engine.worker.get_tp_group", lambda: SimpleNamespace(is_first_rank=first_rank)
        )
        return CaptureWorker(SimpleNamespace(speculative_config=None), SimpleNamespace(num_blocks=6), role)

    return make


SPANS = {"a": Span(4, 3, [2]), "b": Span(0, 1, [5])}
V1 = (SimpleNamespace(slot_mapping={"attn": torch.tensor([8, 9, 10, 20, -1, -1])}), {})
V2 = (SimpleNamespace(slot_mapping={}), {"request_ids": ["a", "b"], "num_tokens": 4})


def plan_of(**settings: Any) -> StepPlan:
    return StepPlan(tokens=4, **{"spans": SPANS, **settings})


@pytest.mark.parametrize("forward", [V1, V2], ids=["V1", "V2"])
def test_a_prompt_that_ends_is_summed_over_its_blocks(
    make_worker: Callable[..., CaptureWorker], forward: tuple[Any, dict[str, Any]]
) -> None:
    worker = make_worker()
    worker.note_forward(*forward)
    report = worker.finish_step(plan_of(finishing={"a": [2], "b": [5]}))
    assert isinstance(report, StepReport)
    ids = worker.capturer.ids
    assert report.layers == (1, 3)
    assert report.misses == 0
    assert report.union is None
    for layer in (0, 1):
        expected = np.bincount(ids[:3, layer].ravel(), minlength=10)
        assert report.counts["a"][layer].tolist() == expected.tolist()
        assert report.counts["b"][layer].tolist() == np.bincount(ids[3, layer], minlength=10).tolist()
    assert (worker.capturer.device_buffer == -1).all()


@pytest.mark.parametrize(
    "forward",
    [
        (SimpleNamespace(slot_mapping={}), {}),
        (SimpleNamespace(slot_mapping=[{"attn": torch.arange(2)}]), {}),
        (SimpleNamespace(slot_mapping={"attn": torch.arange(2)}), {}),
        (SimpleNamespace(slot_mapping={}), {"request_ids": ["a", "c"], "num_tokens": 4}),
        (SimpleNamespace(slot_mapping={}), {"request_ids": ["a", "b"], "num_tokens": 3}),
        (SimpleNamespace(slot_mapping={}), {"request_ids": ["a"], "num_tokens": 4}),
    ],
    ids=[
        "nothing",
        "two micro-batches",
        "too few slots",
        "unplanned request",
        "other tokens",
        "fewer requests",
    ],
)
def test_tokens_of_unknown_slots_are_a_miss_and_stay_uncovered(
    make_worker: Callable[..., CaptureWorker], forward: tuple[Any, dict[str, Any]]
) -> None:
    """Also: what an earlier step noted is never used for a later one."""
    worker = make_worker()
    worker.note_forward(*V1)
    worker.finish_step(plan_of())
    worker.capturer.capture()
    worker.note_forward(*forward)
    report = worker.finish_step(plan_of(forget=[2], finishing={"a": [2]}))
    assert isinstance(report, StepReport)
    assert report.misses == 1
    assert report.counts["a"].sum() == 0
    again = worker.finish_step(plan_of())
    assert isinstance(again, StepReport)
    assert again.misses == 1


def test_only_misses_of_the_step_itself_are_reported(make_worker: Callable[..., CaptureWorker]) -> None:
    """Case 1.10: warm-up and dummy batches may have any shape."""
    worker = make_worker()
    worker.capturer.misses = 5
    worker.begin_step()
    worker.capturer.misses += 2
    worker.note_forward(*V1)
    report = worker.finish_step(plan_of())
    assert isinstance(report, StepReport)
    assert report.misses == 2


def test_a_decode_step_needs_no_slots_unless_a_request_is_tracked(
    make_worker: Callable[..., CaptureWorker],
) -> None:
    worker = make_worker(WorkerRole.DECODE)
    assert worker.cache is None
    report = worker.finish_step(plan_of(decode_tokens=4, finishing={"a": [2]}))
    assert isinstance(report, StepReport)
    assert (report.misses, report.decode_tokens, report.counts, report.picks) == (0, 4, {}, {})
    touched = np.zeros((2, 10), bool)
    for layer in (0, 1):
        touched[layer, worker.capturer.ids[:, layer]] = True
    np.testing.assert_array_equal(report.union, touched)
    worker.capturer.capture()
    worker.note_forward(*V2)
    tracked = {"b": SPANS["b"], "a": Span(5, 2, [2])}
    report = worker.finish_step(plan_of(decode_tokens=4, tracked=tracked))
    assert isinstance(report, StepReport)
    assert report.misses == 0
    np.testing.assert_array_equal(report.picks["b"], worker.capturer.ids[3:])
    np.testing.assert_array_equal(report.picks["a"], worker.capturer.ids[1:3])


def test_blocks_handed_out_in_a_step_without_tokens_start_empty(
    make_worker: Callable[..., CaptureWorker],
) -> None:
    worker = make_worker()
    worker.note_forward(*V1)
    worker.finish_step(plan_of())
    assert worker.cache is not None
    assert worker.finish_step(StepPlan(forget=[2])) is None
    assert int(worker.cache.total([2]).sum()) == 0
    assert int(worker.cache.total([5]).sum()) == 4


def test_a_rank_that_does_not_report_captures_and_clears(make_worker: Callable[..., CaptureWorker]) -> None:
    worker = make_worker(first_rank=False)
    worker.note_forward(*V1)
    assert worker.finish_step(plan_of(forget=[2])) is None
    assert worker.cache is None
    assert (worker.capturer.device_buffer == -1).all()


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
