"""Worker side: reduces each step's picks to block rows, finished prompts, the step's union and tracked picks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from eldr.engine.capture import capturer_for
from eldr.engine.kernels import reducer_for
from eldr.engine.kernels.contract import Pending, StepWork
from eldr.engine.kernels.slots import batch_slots
from eldr.engine.kv_group import signature_group
from eldr.engine.prompt_slots import PromptSlots
from eldr.engine.report import PendingReport, StepReport
from eldr.engine.signature_cache import SignatureCache
from eldr.engine.step import StepPlan
from eldr.rpc.worker_info import WorkerRole


@dataclass(frozen=True, slots=True)
class _Batch:
    """Where the tokens of a forward pass lie: their slots (Model Runner V1), or the requests' order (V2)."""

    mapping: torch.Tensor | None = None
    order: Sequence[str] | None = None
    tokens: int | None = None

    def slots(self, plan: StepPlan, block_size: int) -> torch.Tensor | npt.NDArray[np.int64] | None:
        """KV slot of each token of the plan; None where they are unknown."""
        if self.mapping is not None:
            return self.mapping[: plan.tokens] if len(self.mapping) >= plan.tokens else None
        if self.order is None or self.tokens not in (None, plan.tokens):
            return None
        slots = batch_slots(self.order, plan.spans, block_size)
        return slots if slots is not None and slots.size == plan.tokens else None


class CaptureWorker:
    """One per vLLM worker. Every rank captures (upstream may gather in step); TP rank 0 reduces and reports."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: WorkerRole) -> None:
        self.capturer = capturer_for(vllm_config)
        group = signature_group(kv_cache_config)
        self._attention_layer = group.layer_name
        self._block_size = group.block_size
        self._reports = bool(get_tp_group().is_first_rank)
        self.cache: SignatureCache | None = None
        self._prompt_slots: PromptSlots | None = None
        if self._reports:
            layers, experts = len(self.capturer.layers), self.capturer.experts
            device = self.capturer.device_buffer.device
            if role is WorkerRole.PREFILL:
                self.cache = SignatureCache(
                    kv_cache_config.num_blocks, layers, experts, group.block_size, device
                )
                if vllm_config.speculative_config is not None:
                    self._prompt_slots = PromptSlots(kv_cache_config.num_blocks, group.block_size, device)
            self._reducer = reducer_for(device.type, layers, experts, self.capturer.top_k, self.cache)
        self._batch = _Batch()

    def begin_step(self) -> None:
        """Before the forward pass."""
        self.capturer.begin_step()

    def note_forward(self, forward_context: Any, load_kwargs: dict[str, Any]) -> None:
        """Keeps where the step's tokens lie: the slot mapping of Model Runner V1, or the batch's order on V2."""
        mapping = getattr(forward_context, "slot_mapping", None)
        slots = mapping.get(self._attention_layer) if isinstance(mapping, dict) else None
        self._batch = _Batch(slots, load_kwargs.get("request_ids"), load_kwargs.get("num_tokens"))

    def finish_step(self, plan: StepPlan) -> StepReport | PendingReport | None:
        """Reduces the step that just ran. None for a step without tokens and on ranks that do not report.

        Never waits for the device: what is not there yet is a PendingReport.
        """
        batch, self._batch = self._batch, _Batch()
        if self._prompt_slots is not None:
            self._prompt_slots.handed_out(plan.forget, plan.limits)
        if plan.tokens == 0:
            if self.cache is not None and plan.forget:
                self._reducer.reduce(StepWork(self.capturer.picks(0), forget=plan.forget))
            return None
        misses = self.capturer.take_misses()
        try:
            return self._reduce(plan, batch, misses) if self._reports else None
        finally:
            self.capturer.clear(plan.tokens)

    def _reduce(self, plan: StepPlan, batch: _Batch, misses: int) -> StepReport | PendingReport:
        work = StepWork(self.capturer.picks(plan.tokens), union=plan.decode_tokens == plan.tokens)
        tracked: dict[str, int] = {}
        if self.cache is not None or plan.tracked:
            # Unknown slots: the step's tokens stay uncovered, and what they completed says so.
            work.slots = batch.slots(plan, self._block_size)
            misses += work.slots is None
        if self.cache is not None:
            work.forget = plan.forget
            work.complete = list(plan.finishing.values())
        if plan.tracked:
            tracked = {request_id: span.tokens for request_id, span in plan.tracked.items()}
            work.wanted = np.concatenate([span.slots(self._block_size) for span in plan.tracked.values()])
        if self._prompt_slots is not None and work.slots is not None:
            # Only generated tokens are wanted, and none of them counts.
            work.slots = self._prompt_slots.only(work.slots)
            work.wanted = self._prompt_slots.beyond(work.wanted)
        finishing = list(plan.finishing) if self.cache is not None else []
        pending = self._reducer.reduce(work)
        layers = self.capturer.layers

        def read() -> StepReport:
            return _report(pending, layers, plan.decode_tokens, misses, finishing, tracked)

        return read() if pending.done else PendingReport(read)


def _report(
    pending: Pending,
    layers: tuple[int, ...],
    decode_tokens: int,
    misses: int,
    finishing: Sequence[str],
    tracked: dict[str, int],
) -> StepReport:
    """The step's results by request: counts of `finishing`, picks of `tracked` (request -> wanted tokens)."""
    reduced = pending.result()
    picks: dict[str, npt.NDArray[np.int32]] = {}
    if reduced.picks is not None:
        ends = np.cumsum(list(tracked.values()))[:-1]
        picks = dict(zip(tracked, np.split(reduced.picks, ends), strict=True))
    return StepReport(
        layers,
        decode_tokens,
        counts=dict(zip(finishing, reduced.counts, strict=True)),
        union=reduced.union,
        picks=picks,
        misses=misses,
    )
