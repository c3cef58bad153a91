"""The reduction on CPUs, in numpy.

`np.add.at` on a flat view costs about 1.1 ns a pick, the index of each pick about as much again; a compiled loop
would take 0.8 ns in all (`floor` of integration/bench/reduction.py). Numba, the compiler at hand, was measured and
left out: it adds 140 MB and a second of CPU time to every worker, and vLLM 0.32.0 cannot start a second CPU engine
in a process that has llvmlite loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eldr.engine.kernels.contract import Reduced, StepWork
from eldr.engine.signature_cache import SignatureCache

PICKS_AT_A_TIME = 1 << 15
"""Their indices, 8 bytes each, stay in the second cache level."""


@dataclass(frozen=True, slots=True)
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
        # Cell of a pick in its block's row, without the expert. [layers * top_k]
        self._row = experts if self._rows is None else self._rows.shape[2]
        self._cell = np.repeat(np.arange(layers, dtype=np.int64) * self._row, top_k)
        self._index = np.empty((max(1, PICKS_AT_A_TIME // self._cell.size), self._cell.size), np.int64)

    def reduce(self, work: StepWork) -> Ready:
        """Reduces one step."""
        ids = np.ascontiguousarray(work.ids.numpy())
        slots = work.slots.numpy() if isinstance(work.slots, torch.Tensor) else work.slots
        counts = []
        if self._rows is not None:
            self._rows[np.asarray(work.forget, np.int64)] = 0
            if slots is not None:
                self._add(self._rows, slots, ids)
            counts = [self._counts(self._rows, blocks) for blocks in work.complete]
        union = self._union(ids) if work.union else None
        return Ready(Reduced(counts, picks_at(ids, slots, work.wanted), union))

    def _add(
        self, rows: npt.NDArray[np.int32], slots: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]
    ) -> None:
        real = (slots >= 0) & (slots < len(rows) * self._block_size)
        if not real.all():
            slots, ids = slots[real], ids[real]
        blocks = slots // self._block_size
        rows[blocks[slots % self._block_size == 0]] = 0
        known = None if self._captured(ids) else ids.view(np.uint32) < self._experts
        cells = rows.reshape(-1)
        for tokens, index in self._indices(ids, blocks * (self._layers * self._row)):
            picked = index.reshape(-1) if known is None else index[known[tokens].reshape(index.shape)]
            np.add.at(cells, picked, rows.dtype.type(1))

    def _counts(self, rows: npt.NDArray[np.int32], blocks: "npt.ArrayLike") -> npt.NDArray[np.int32]:
        total: npt.NDArray[np.int32] = rows[np.asarray(blocks, np.int64)].sum(axis=0, dtype=np.int32)
        return total[:, : self._experts]

    def _union(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8] | None:
        if not self._captured(ids):
            return None
        touched = np.zeros((self._layers, self._row), bool)
        for _, index in self._indices(ids, np.zeros(len(ids), np.int64)):
            touched.reshape(-1)[index.reshape(-1)] = True
        return np.packbits(touched[:, : self._experts], axis=1)

    def _indices(
        self, ids: npt.NDArray[np.int32], begins: npt.NDArray[np.int64]
    ) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
        """Cell of each pick counted from its token's entry in `begins`, int64 [tokens, layers * top_k], in parts.

        A part is overwritten by the next.
        """
        picks = ids.reshape(len(ids), self._cell.size)
        for start in range(0, len(picks), len(self._index)):
            tokens = slice(start, start + len(self._index))
            index = self._index[: len(picks[tokens])]
            np.add(self._cell, begins[tokens, None], out=index)
            index += picks[tokens]
            yield tokens, index

    def _captured(self, ids: npt.NDArray[np.int32]) -> bool:
        # A negative id is a large unsigned one.
        return bool(ids.size == 0 or ids.view(np.uint32).max() < self._experts)


def picks_at(
    ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int64] | None, wanted: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32] | None:
    """Picks of the tokens at the `wanted` slots, -1 for slots that the step lacks. None where none is wanted."""
    if not wanted.size:
        return None
    picks = np.full((wanted.size, *ids.shape[1:]), -1, np.int32)
    if slots is not None and slots.size:
        order = np.argsort(slots)
        place = np.minimum(np.searchsorted(slots, wanted, sorter=order), slots.size - 1)
        rows = order[place]
        found = slots[rows] == wanted
        picks[found] = ids[rows[found]]
    return picks
