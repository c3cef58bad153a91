"""The reduction on CPUs, in numpy, a layer at a time.

`np.add.at` on a flat view costs about 1.1 ns a pick, the index of each pick about as much again; a compiled loop
would take 0.8 ns in all (`floor` of integration/bench/reduction.py). Numba, the compiler at hand, was measured and
left out: it adds 140 MB and a second of CPU time to every worker, and vLLM 0.32.0 cannot start a second CPU engine
in a process that has llvmlite loaded.

A decode step reads so many weights that it leaves nothing of this in the processor's caches: there each numpy
function costs 10 to 60 us at its first call of a step and 1 to 5 us at the next, so `_union` uses few of them, often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eldr.engine.kernels.contract import Reduced, StepWork
from eldr.engine.signature_cache import SignatureCache

PICKS_AT_A_TIME = 1 << 15
"""Their indices, 8 bytes each, stay in the second cache level."""

LayerIds = Sequence[npt.NDArray[np.uint32]]
"""Expert ids [tokens, top_k] of each layer; a negative one is a large one."""


@dataclass(slots=True)
class Ready:
    """Results that are there already."""

    reduced: Reduced
    done: bool = True

    def result(self) -> Reduced:
        """The results."""
        return self.reduced


class VectorReducer:
    """The reduction over host memory, on the calling thread. Its results are there when `reduce` returns."""

    def __init__(self, layers: int, experts: int, top_k: int, cache: SignatureCache | None) -> None:
        self._layers, self._experts = layers, experts
        self._rows = None if cache is None else cache.storage.numpy()
        self._block_size = 1 if cache is None else cache.block_size
        self._tokens_at_a_time = max(1, PICKS_AT_A_TIME // top_k)

    def reduce(self, work: StepWork) -> Ready:
        """Reduces one step."""
        ids = _by_layer(work.ids)
        slots = work.slots.numpy() if isinstance(work.slots, torch.Tensor) else work.slots
        counts = []
        if self._rows is not None:
            self._rows[np.asarray(work.forget, np.int64)] = 0
            if slots is not None:
                self._add(self._rows, slots, ids)
            counts = [self._counts(self._rows, blocks) for blocks in work.complete]
        union = self._union(ids) if work.union else None
        picks = picks_at(ids, slots, work.wanted) if work.wanted.size else None
        return Ready(Reduced(counts, picks, union))

    def _add(self, rows: npt.NDArray[np.int32], slots: npt.NDArray[np.int64], ids: LayerIds) -> None:
        real = (slots >= 0) & (slots < len(rows) * self._block_size)
        if not real.all():
            slots, ids = slots[real], [layer_ids[real] for layer_ids in ids]
        blocks = slots // self._block_size
        rows[blocks[slots % self._block_size == 0]] = 0
        cells, one = rows.reshape(-1), rows.dtype.type(1)
        width = rows.shape[2]
        begins = (blocks * (self._layers * width))[:, None]
        for layer, layer_ids in enumerate(ids):
            for start in range(0, len(slots), self._tokens_at_a_time):
                tokens = slice(start, start + self._tokens_at_a_time)
                some = layer_ids[tokens]
                index = some + begins[tokens]
                index += layer * width
                known = some < self._experts
                np.add.at(cells, index.reshape(-1) if known.all() else index[known], one)

    def _counts(self, rows: npt.NDArray[np.int32], blocks: "npt.ArrayLike") -> npt.NDArray[np.int32]:
        total: npt.NDArray[np.int32] = rows[np.asarray(blocks, np.int64)].sum(axis=0, dtype=np.int32)
        return total[:, : self._experts]

    def _union(self, ids: LayerIds) -> npt.NDArray[np.bool_] | None:
        touched = np.zeros((self._layers, self._experts), bool)
        try:
            for layer, layer_ids in enumerate(ids):
                touched[layer][layer_ids] = True
        except IndexError:
            return None
        return touched


def _by_layer(ids: torch.Tensor | Sequence[npt.NDArray[Any]]) -> LayerIds:
    layers = ids.numpy().swapaxes(0, 1) if isinstance(ids, torch.Tensor) else ids
    return [layer_ids.astype(np.int32, copy=False).view(np.uint32) for layer_ids in layers]


def picks_at(
    ids: LayerIds, slots: npt.NDArray[np.int64] | None, wanted: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Picks of the tokens at the `wanted` slots [wanted, layers, top_k], -1 for slots that the step lacks."""
    picks = np.full((wanted.size, len(ids), ids[0].shape[1]), -1, np.int32)
    if slots is not None and slots.size:
        order = np.argsort(slots)
        place = np.minimum(np.searchsorted(slots, wanted, sorter=order), slots.size - 1)
        rows = order[place]
        found = slots[rows] == wanted
        for layer, layer_ids in enumerate(ids):
            picks[found, layer] = layer_ids[rows[found]].view(np.int32)
    return picks
