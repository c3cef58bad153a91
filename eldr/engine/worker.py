"""Worker side: reduces each step's picks to block rows, finished prompts, the step's union and tracked picks."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from eldr.engine.capture import Capturer
from eldr.engine.kv_group import signature_group
from eldr.engine.report import StepReport
from eldr.engine.signature_cache import SignatureCache
from eldr.engine.step import StepPlan
from eldr.rpc.worker_info import WorkerRole


class CaptureWorker:
    """One per vLLM worker. Every rank captures (upstream may gather in step); TP rank 0 reduces and reports."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, role: WorkerRole) -> None:
        self.capturer = Capturer(vllm_config)
        group = signature_group(kv_cache_config)
        self._attention_layer = group.layer_name
        self._block_size = group.block_size
        self._reports = bool(get_tp_group().is_first_rank)
        self.cache: SignatureCache | None = None
        if role is WorkerRole.PREFILL and self._reports:
            buffer = self.capturer.device_buffer
            self.cache = SignatureCache(
                kv_cache_config.num_blocks,
                len(self.capturer.layers),
                self.capturer.experts,
                group.block_size,
                buffer.device,
            )
        self._slots: torch.Tensor | None = None
        self._order: list[str] | None = None

    def note_forward(self, forward_context: Any, load_kwargs: dict[str, Any]) -> None:
        """Keeps the step's slot mapping (Model Runner V1) or its batch order (V2)."""
        mapping = getattr(forward_context, "slot_mapping", None)
        self._slots = mapping.get(self._attention_layer) if isinstance(mapping, dict) else None
        self._order = load_kwargs.get("request_ids")

    def finish_step(self, plan: StepPlan) -> StepReport | None:
        """Reduces the step that just ran. None for a step without tokens and on ranks that do not report."""
        slots, self._slots = self._slots, None
        if plan.tokens == 0:
            if self.cache is not None:
                self.cache.forget(plan.forget)
            return None
        misses = self.capturer.take_misses()
        try:
            return self._reduce(plan, slots, misses) if self._reports else None
        finally:
            self.capturer.clear(plan.tokens)

    def _reduce(self, plan: StepPlan, mapped: torch.Tensor | None, misses: int) -> StepReport:
        report = StepReport(self.capturer.layers, plan.decode_tokens, misses=misses)
        ids = self.capturer.picks(plan.tokens)
        slots = self._step_slots(plan, mapped)
        if slots is None:
            report.misses += 1
        if self.cache is not None:
            self.cache.forget(plan.forget)
            if slots is not None:
                self.cache.add(slots, ids)
                for request_id, blocks in plan.finishing.items():
                    report.counts[request_id] = self.cache.total(blocks).cpu().numpy()
        if plan.decode_tokens == plan.tokens:
            report.union = self._union(ids)
        if plan.tracked and slots is not None:
            rows = {int(slot): row for row, slot in enumerate(slots.tolist())}
            for request_id, span in plan.tracked.items():
                where = [rows[slot] for slot in span.slots(self._block_size).tolist() if slot in rows]
                report.picks[request_id] = ids[where].cpu().numpy()
        return report

    def _step_slots(self, plan: StepPlan, mapped: torch.Tensor | None) -> torch.Tensor | None:
        if mapped is not None:
            return mapped[: plan.tokens]
        if self._order is None or any(request_id not in plan.spans for request_id in self._order):
            return None
        slots = np.concatenate([plan.spans[request_id].slots(self._block_size) for request_id in self._order])
        return torch.from_numpy(slots).to(self.capturer.device_buffer.device, non_blocking=True)

    def _union(self, ids: torch.Tensor) -> "np.typing.NDArray[np.uint8] | None":
        layers, experts = len(self.capturer.layers), self.capturer.experts
        touched = torch.zeros((layers, experts + 1), dtype=torch.bool, device=ids.device)
        flat = ids.permute(1, 0, 2).reshape(layers, -1).long()
        touched.scatter_(1, torch.where(flat < 0, experts, flat), True)
        bits = touched.cpu().numpy()
        return None if bits[:, experts].any() else np.packbits(bits[:, :experts], axis=1)
