"""Records the experts that every token selects, with vLLM's own capture callback."""

from typing import Any

import numpy.typing as npt
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform

NOT_CAPTURED = -1


class CaptureError(RuntimeError):
    """Capture cannot be exact in this configuration; the engine must not start with it."""


def check_supported(vllm_config: VllmConfig) -> None:
    """Raises CaptureError, which names the setting, where capture would be wrong, dead or unreachable.

    Context parallelism: a KV block holds parts of tokens of several ranks. Microbatches: each would overwrite
    the rows of the one before. Data parallelism behind one server: a gateway could not address the rank whose
    state and signatures it knows. Compilation on CPU builds: their layers are traced before capture is bound.
    """
    if current_platform.is_cpu() and vllm_config.compilation_config.mode != CompilationMode.NONE:
        raise CaptureError(
            "eldr cannot capture in compiled layers of a CPU build; start with --enforce-eager"
        )
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise CaptureError(f"eldr does not capture under {name} > 1, got {getattr(parallel, name)}")
    if parallel.use_ubatching:
        raise CaptureError("eldr does not capture under dual-batch overlap; start without --enable-dbo")
    alone = parallel.data_parallel_external_lb or (
        parallel.data_parallel_hybrid_lb and parallel.data_parallel_size_local == 1
    )
    if parallel.data_parallel_size > 1 and not alone:
        raise CaptureError(
            "eldr needs a server for each data-parallel rank: start every rank with --data-parallel-rank and "
            "its own eldr worker_id, grpc_listen and http_url"
        )


def target_moe_layers(vllm_config: VllmConfig) -> dict[int, MoERunner]:
    """MoE layers of the target model by layer index, ascending.

    Draft layers sit in the same table with indices that clash with, or lie beyond, the target's (case 1.4); the
    target's are registered first.
    """
    found: dict[int, MoERunner] = {}
    last = vllm_config.model_config.get_total_num_hidden_layers()
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, MoERunner) and layer.layer_id < last:
            found.setdefault(layer.layer_id, layer)
    return dict(sorted(found.items()))


class Capturer(RoutedExpertsCapturer):  # type: ignore[misc]
    """Upstream's row selection over a buffer of MoE layers only, int32 [max_tokens, moe_layers, top_k].

    Ids are logical: upstream calls back before the mapping to replicas (case 1.5). The buffer is preallocated
    and holds NOT_CAPTURED where nothing was written since `clear`, so that a layer that bypassed the hook shows
    as missing and never as "expert 0" (cases 1.3, 1.6).
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        if getattr(vllm_config.model_config, "enable_return_routed_experts", False):
            raise CaptureError(
                "--enable-return-routed-experts takes the one capture callback that vLLM has; start without it "
                "to use eldr"
            )
        runners = target_moe_layers(vllm_config)
        if not runners:
            raise CaptureError(
                f"{vllm_config.model_config.model} has no MoE layer, so there is nothing to capture"
            )
        self.layers = tuple(runners)
        self.experts = vllm_config.model_config.get_num_experts()
        self.top_k = vllm_config.model_config.get_num_experts_per_tok()
        self.misses = 0
        self.dp_rank = vllm_config.parallel_config.data_parallel_rank
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self.device_buffer = torch.full(
            (vllm_config.scheduler_config.max_num_batched_tokens, len(self.layers), self.top_k),
            NOT_CAPTURED,
            dtype=torch.int32,
            device=current_platform.device_type,
        )
        try:
            bind_routed_experts_capturer(torch.nn.ModuleList(runners.values()), self)
        except ValueError as error:
            raise CaptureError(f"eldr cannot capture experts here: {error}") from error

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Callback of one layer. A batch layout that upstream does not know is a miss, not a crash (case 1.10)."""
        row = self._row[layer_id]
        if get_forward_context().dp_metadata is None:
            # Padding may exceed the largest step by some rows; it stands behind the real tokens.
            topk_ids = topk_ids[: len(self.device_buffer)]
        try:
            super().capture(row, topk_ids)
        except AssertionError:
            # Nothing of an earlier batch may stand in for what this one selected.
            self.device_buffer[:, row] = NOT_CAPTURED
            self.misses += 1

    def picks(self, tokens: int) -> torch.Tensor | list[npt.NDArray[Any]]:
        """Ids of the step's first `tokens` rows, as StepWork.ids; valid until `clear`."""
        return self.device_buffer[:tokens]

    def clear(self, tokens: int) -> None:
        """Marks the rows as not captured, for the next step."""
        self.device_buffer[:tokens] = NOT_CAPTURED

    def begin_step(self) -> None:
        """Forgets what warm-up and dummy batches left behind; they may have had any shape."""
        self.misses = 0

    def take_misses(self) -> int:
        """Misses since the last call."""
        misses, self.misses = self.misses, 0
        return misses


class EagerCapturer(Capturer):
    """Keeps each layer's ids where its router left them, instead of copying them.

    For engines that run every layer in Python and see only their own tokens. There a copy inside the layer costs
    more than the whole reduction after the step: its code comes anew from memory each time. Upstream neither writes
    to the ids nor uses their memory again while they are kept.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._none: list[torch.Tensor | None] = [None] * len(self.layers)
        self._kept = list(self._none)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Callback of one layer."""
        self._kept[self._row[layer_id]] = topk_ids

    def picks(self, tokens: int) -> torch.Tensor | list[npt.NDArray[Any]]:
        """See `Capturer.picks`."""
        whole = [ids.numpy()[:tokens] for ids in self._kept if ids is not None]
        if len(whole) == len(self._kept) and all(len(ids) == tokens for ids in whole):
            return whole
        picks = torch.full((tokens, len(self.layers), self.top_k), NOT_CAPTURED, dtype=torch.int32)
        for row, ids in enumerate(self._kept):
            if ids is not None:
                picks[: len(ids), row] = ids[:tokens]
        return picks

    def clear(self, tokens: int) -> None:
        """See `Capturer.clear`."""
        self._kept = list(self._none)

    def begin_step(self) -> None:
        """See `Capturer.begin_step`."""
        super().begin_step()
        self._kept = list(self._none)


def capturer_for(vllm_config: VllmConfig) -> Capturer:
    """The capturer that fits the engine. Raises CaptureError where none does."""
    alone = vllm_config.parallel_config.data_parallel_size == 1
    eager = current_platform.is_cpu() and vllm_config.compilation_config.mode == CompilationMode.NONE
    return EagerCapturer(vllm_config) if alone and eager else Capturer(vllm_config)
