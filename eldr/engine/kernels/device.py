"""The reduction on GPUs: one copy in, one kernel, one copy out, and nobody waits before the results are read."""

from collections import deque
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from eldr.engine.kernels.contract import Reduced, StepWork
from eldr.engine.kernels.fused import SHARD, reduce_step
from eldr.engine.kernels.link import Link, Mark
from eldr.engine.signature_cache import SignatureCache

TOKENS_AT_A_TIME = 128
SMALLEST_BUFFER = 1024


@dataclass(slots=True)
class _Buffers:
    """Memory of one step in flight, on both sides. `mark` lies behind its copy out."""

    plan_on_host: torch.Tensor
    plan: torch.Tensor
    out: torch.Tensor
    out_on_host: torch.Tensor
    mark: Mark


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a step's results lie in its output vector."""

    layers: int
    experts: int
    top_k: int
    completes: int
    wants: int
    union: bool

    @property
    def shards(self) -> int:
        return -(-self.experts // SHARD)

    @property
    def union_words(self) -> int:
        """Per layer a word for every shard, then one that says whether a pick is missing."""
        return self.layers * (self.shards + 1)

    @property
    def words(self) -> int:
        per_prompt, per_token = self.layers * self.experts, self.layers * self.top_k
        return self.union_words + self.completes * per_prompt + self.wants * per_token

    def read(self, out: npt.NDArray[np.int32]) -> Reduced:
        """The results as arrays of their own."""
        header = out[: self.union_words].reshape(self.layers, self.shards + 1)
        union = None
        if self.union and not header[:, -1].any():
            words = np.ascontiguousarray(header[:, :-1], "<i4")
            union = np.unpackbits(words.view(np.uint8), axis=1, count=self.experts).view(np.bool_)
        counts_end = self.union_words + self.completes * self.layers * self.experts
        counts = out[self.union_words : counts_end].reshape(self.completes, self.layers, self.experts)
        picks = out[counts_end : self.words].reshape(self.wants, self.layers, self.top_k)
        return Reduced(list(counts.copy()), picks.copy() if self.wants else None, union)


class _InFlight:
    """Results that the device still writes. Reading them gives their memory back."""

    def __init__(self, layout: _Layout, buffers: _Buffers, free: deque[_Buffers]) -> None:
        self._layout = layout
        self._buffers: _Buffers | None = buffers
        self._free = free
        self._reduced: Reduced | None = None

    @property
    def done(self) -> bool:
        return self._buffers is None or self._buffers.mark.reached()

    def result(self) -> Reduced:
        if self._buffers is not None:
            self._buffers.mark.wait()
            self._reduced = self._layout.read(self._buffers.out_on_host.numpy())
            self._free.append(self._buffers)
            self._buffers = None
        assert self._reduced is not None
        return self._reduced


class _Nothing:
    """The results of a step that asked for none."""

    done = True

    def result(self) -> Reduced:
        return Reduced()


class DeviceReducer:
    """The reduction as one kernel on the device's current stream.

    All that a step needs beside its picks goes to the device in one vector, and all results come back in one. Their
    memory is kept in pairs of buffers: a pair returns to the pool when its results are read, so there are as many
    as there are steps whose results are unread, and in a steady state nothing is allocated.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        top_k: int,
        cache: SignatureCache | None,
        link: Link,
        tokens_at_a_time: int = TOKENS_AT_A_TIME,
    ) -> None:
        self._layers, self._experts, self._top_k = layers, experts, top_k
        self._cache = cache
        self._link = link
        self._tile = tokens_at_a_time
        self._free: deque[_Buffers] = deque()
        self._cells = (
            torch.empty(4, dtype=torch.uint8, device=link.device) if cache is None else cache.storage
        )
        self._words = self._cells.view(torch.int32)
        nothing = torch.empty((0, layers, top_k), dtype=torch.int32, device=link.device)
        self.reduce(StepWork(nothing, union=True)).result()

    def reduce(self, work: StepWork) -> _InFlight | _Nothing:
        """Starts one step's reduction."""
        if self._cache is None and not (work.union or work.wanted.size):
            return _Nothing()
        assert isinstance(work.ids, torch.Tensor), "by layer only on the host"
        has_rows = self._cache is not None
        ends = [0, *accumulate(len(blocks) for blocks in work.complete)] if has_rows else [0]
        host_slots = work.slots if isinstance(work.slots, np.ndarray) else np.empty(0, np.int64)
        forget = work.forget if has_rows else ()
        sizes = [len(forget), len(ends), ends[-1], work.wanted.size, host_slots.size]
        forget_at, ends_at, blocks_at, wanted_at, slots_at, plan_size = accumulate(sizes, initial=0)
        del forget_at
        layout = _Layout(
            self._layers, self._experts, self._top_k, len(ends) - 1, int(work.wanted.size), work.union
        )
        buffers = self._take(plan_size, layout.words)
        plan = buffers.plan_on_host.numpy()
        plan[:ends_at] = forget
        plan[ends_at:blocks_at] = ends
        plan[blocks_at:wanted_at] = list(chain.from_iterable(work.complete)) if has_rows else ()
        plan[wanted_at:slots_at] = work.wanted
        plan[slots_at:plan_size] = host_slots
        self._link.copy(buffers.plan[:plan_size], buffers.plan_on_host[:plan_size])
        if isinstance(work.slots, torch.Tensor):
            slots, slots_at = work.slots.to(torch.int64), 0
        else:
            slots = buffers.plan
        tokens = work.ids.shape[0]
        reduce_step[(self._layers, layout.shards)](
            work.ids.contiguous(),
            slots,
            buffers.plan,
            self._cells,
            self._words,
            buffers.out,
            tokens=tokens,
            slotted=0 if work.slots is None else tokens,
            slots_at=slots_at,
            blocks=self._cells.shape[0],
            forgets=len(forget),
            completes=layout.completes,
            ends_at=ends_at,
            blocks_at=blocks_at,
            wants=layout.wants,
            wanted_at=wanted_at,
            LAYERS=self._layers,
            EXPERTS=self._experts,
            TOP_K=self._top_k,
            ROW=self._cells.shape[-1],
            BLOCK_SIZE=1 if self._cache is None else self._cache.block_size,
            PACKED=self._cells.dtype == torch.uint8,
            HAS_ROWS=has_rows,
            PICKS=1 << (self._top_k - 1).bit_length(),
            TILE=self._tile,
            SHARD=SHARD,
            num_warps=8,
        )
        if not work.asks:
            buffers.mark.set()
            self._free.append(buffers)
            return _Nothing()
        self._link.copy(buffers.out_on_host[: layout.words], buffers.out[: layout.words])
        buffers.mark.set()
        return _InFlight(layout, buffers, self._free)

    def _take(self, plan_size: int, out_size: int) -> _Buffers:
        """Buffers of at least these sizes that no step in flight uses."""
        try:
            buffers = self._free.popleft()
        except IndexError:
            buffers = self._new(plan_size, out_size)
        if not buffers.mark.reached():
            self._free.append(buffers)
            buffers = self._new(plan_size, out_size)
        if buffers.plan.numel() < plan_size or buffers.out.numel() < out_size:
            buffers = self._new(max(plan_size, buffers.plan.numel()), max(out_size, buffers.out.numel()))
        return buffers

    def _new(self, plan_size: int, out_size: int) -> _Buffers:
        plan_size, out_size = (
            max(SMALLEST_BUFFER, 1 << (size - 1).bit_length()) for size in (plan_size, out_size)
        )
        link = self._link
        return _Buffers(
            plan_on_host=link.host_buffer(plan_size, torch.int64),
            plan=torch.empty(plan_size, dtype=torch.int64, device=link.device),
            out=torch.empty(out_size, dtype=torch.int32, device=link.device),
            out_on_host=link.host_buffer(out_size, torch.int32),
            mark=link.new_mark(),
        )
