"""One suite for both implementations of the step's reduction, against a reference that loops over tokens.

The Triton kernel runs on a GPU (`-m gpu`), and in Triton's interpreter where TRITON_INTERPRET=1 is set before Triton
is imported; the last test runs this file so, in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.engine.kernels import reducer_for
from eldr.engine.kernels.contract import StepReducer, StepWork
from eldr.engine.signature_cache import SignatureCache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_DEVICE = pytest.mark.engine if INTERPRETED else pytest.mark.gpu
# Each shape of a model is a compilation of its own on a GPU.
EXAMPLES = 15 if INTERPRETED or torch.cuda.is_available() else 80
DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK_SIZES = [1, 16, 32, 128, 255, 256]

both = pytest.mark.parametrize(
    "kind", [pytest.param("vectorised", marks=pytest.mark.engine), pytest.param("triton", marks=ON_DEVICE)]
)


class InterpretedMark:
    """Reached when somebody waited for it; only then do the copies before it happen."""

    def __init__(self, link: "InterpretedLink") -> None:
        self._link = link
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set(self) -> None:
        self._before, self._link.copies = self._link.copies, []

    def reached(self) -> bool:
        return not self._before

    def wait(self) -> None:
        self._link.waits += 1
        for target, source in self._before:
            target.copy_(source)
        self._before = []


class InterpretedLink:
    """A device whose copies to the host arrive as late as they may."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        self._host: set[int] = set()

    def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.full((length,), -7, dtype=dtype)
        self._host.add(buffer.data_ptr())
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.data_ptr() in self._host:
            self.copies.append((target, source))
        else:
            target.copy_(source)

    def new_mark(self) -> InterpretedMark:
        return InterpretedMark(self)


@dataclass
class Model:
    """A model's shape, its cache and the reducer under test."""

    layers: int
    experts: int
    top_k: int
    cache: SignatureCache | None
    reducer: StepReducer
    device: str

    def rows(self) -> npt.NDArray[np.int64]:
        assert self.cache is not None
        return self.cache.rows.cpu().numpy().astype(np.int64)

    def ids(self, picks: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(picks).to(self.device)

    def slots(self, slots: Any) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64).to(self.device)


def model_of(
    kind: str, layers: int = 3, experts: int = 8, top_k: int = 2, block_size: int = 8, blocks: int = 6
) -> Model:
    """blocks = 0: no cache, as on a decode worker."""
    device = "cpu" if kind == "vectorised" else DEVICE
    cache = SignatureCache(blocks, layers, experts, block_size, device) if blocks else None
    if kind == "triton" and INTERPRETED:
        from eldr.engine.kernels.device import DeviceReducer

        reducer: StepReducer = DeviceReducer(layers, experts, top_k, cache, InterpretedLink(), 16)
    else:
        reducer = reducer_for(device, layers, experts, top_k, cache)
    return Model(layers, experts, top_k, cache, reducer, device)


def random_picks(rng: np.random.Generator, tokens: int, model: Model) -> npt.NDArray[np.int32]:
    ranks = rng.random((tokens, model.layers, model.experts)).argsort(axis=2)
    return ranks[:, :, : model.top_k].astype(np.int32)


class Reference:
    """Counts token by token."""

    def __init__(self, blocks: int, layers: int, experts: int, block_size: int) -> None:
        self.rows = np.zeros((blocks, layers, experts), np.int64)
        self.block_size = block_size

    def step(self, ids: Any, slots: Any, forget: list[int]) -> None:
        self.rows[forget] = 0
        known = [slot for slot in slots if 0 <= slot < len(self.rows) * self.block_size]
        for slot in known:
            if slot % self.block_size == 0:
                self.rows[slot // self.block_size] = 0
        for token, slot in zip(ids, slots, strict=True):
            if slot in known:
                for layer, picks in enumerate(token):
                    for expert in picks:
                        if 0 <= expert < self.rows.shape[2]:
                            self.rows[slot // self.block_size, layer, expert] += 1


def union_of(ids: npt.NDArray[np.int32], experts: int) -> npt.NDArray[np.uint8] | None:
    if ((ids < 0) | (ids >= experts)).any():
        return None
    touched = np.zeros((ids.shape[1], experts), bool)
    for token in ids:
        for layer, picks in enumerate(token):
            touched[layer, picks] = True
    return np.packbits(touched, axis=1)


def random_step(
    rng: np.random.Generator, model: Model, filled: dict[int, int], block_size: int, blocks: int
) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Slots of a step that goes on filling, begins anew or fills in the middle some blocks; blocks to forget."""
    slots: list[int] = []
    forget: list[int] = []
    for block in map(int, rng.permutation(blocks)[:2]):
        start = filled.get(block, 0)
        how = rng.random()
        if how < 0.2:
            forget.append(block)
            start = int(rng.integers(block_size))
        elif how < 0.4 or start == block_size:
            start = 0
        end = int(rng.integers(start, block_size)) + 1
        filled[block] = end
        slots += range(block * block_size + start, block * block_size + end)
    padding = [-1] * int(rng.integers(3)) + [blocks * block_size + 3] * int(rng.integers(2))
    return rng.permutation(np.array([*slots, *padding], np.int64)), forget


@both
@pytest.mark.timeout(600)
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_every_implementation_equals_the_loop_over_tokens(kind: str, data: st.DataObject) -> None:
    """Blocks filled in chunks, reused, forgotten, filled in the middle; padding; picks that were not captured."""
    layers, experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    top_k = data.draw(st.integers(1, min(experts, 5)))
    block_size, blocks = data.draw(st.sampled_from(BLOCK_SIZES)), data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    model = model_of(kind, layers, experts, top_k, block_size, blocks)
    reference = Reference(blocks, layers, experts, block_size)
    filled: dict[int, int] = {}
    for _ in range(3):
        slots, forget = random_step(rng, model, filled, block_size, blocks)
        ids = random_picks(rng, slots.size, model)
        if rng.random() < 0.4:
            ids[rng.random(ids.shape) < 0.1] = rng.choice([-1, experts, 255])
        complete = [list(map(int, rng.permutation(blocks)[: rng.integers(blocks + 1)])) for _ in range(2)]
        wanted = np.array([*rng.permutation(slots[slots >= 0])[:3], blocks * block_size + 9], np.int64)
        work = StepWork(
            model.ids(ids),
            model.slots(slots) if rng.random() < 0.5 else slots,
            forget,
            complete,
            wanted,
            union=True,
        )
        reduced = model.reducer.reduce(work).result()
        reference.step(ids, slots, forget)
        np.testing.assert_array_equal(model.rows(), reference.rows)
        for blocks_of_one, counts in zip(complete, reduced.counts, strict=True):
            assert counts.dtype == np.int32
            np.testing.assert_array_equal(counts, reference.rows[blocks_of_one].sum(axis=0))
        expected = union_of(ids, experts)
        if expected is None:
            assert reduced.union is None
        else:
            np.testing.assert_array_equal(reduced.union, expected)
        assert reduced.picks is not None
        for slot, picks in zip(wanted, reduced.picks, strict=True):
            where = np.flatnonzero(slots == slot)
            np.testing.assert_array_equal(picks, ids[where[0]] if where.size else np.full(picks.shape, -1))


@both
def test_padding_tokens_contribute_nothing_to_rows(kind: str) -> None:
    """Case 1.7: 5 real tokens padded to 8, the padding always picks expert 2."""
    model = model_of(kind)
    ids = random_picks(np.random.default_rng(0), 8, model)
    ids[5:] = 2
    model.reducer.reduce(StepWork(model.ids(ids), model.slots([0, 1, 2, 3, 4, -1, -1, -1]))).result()
    assert (model.rows()[0].sum(axis=1) == 5 * model.top_k).all()
    assert model.rows()[1:].sum() == 0


@both
def test_a_layer_that_was_not_captured_counts_nothing_and_voids_the_union(kind: str) -> None:
    """Case 1.6: the sums then disagree between layers, which the hand-off refuses."""
    model = model_of(kind)
    ids = random_picks(np.random.default_rng(0), 4, model)
    ids[:, 1] = -1
    work = StepWork(model.ids(ids), model.slots(range(4)), complete=[[0]], union=True)
    reduced = model.reducer.reduce(work).result()
    assert reduced.counts[0].sum(axis=1).tolist() == [8, 0, 8]
    assert reduced.union is None


@both
@pytest.mark.parametrize("block_size", [128, 255, 256])
def test_a_full_block_of_the_same_experts_spills_into_no_neighbour(kind: str, block_size: int) -> None:
    """Four counts share a word: the largest count of a byte is the block size."""
    model = model_of(kind, layers=2, experts=10, top_k=4, block_size=block_size, blocks=2)
    ids = np.tile(np.array([0, 3, 4, 9], np.int32), (block_size, 2, 1))
    model.reducer.reduce(StepWork(model.ids(ids), model.slots(range(block_size)))).result()
    expected = np.zeros(10, np.int64)
    expected[[0, 3, 4, 9]] = block_size
    assert model.rows()[0].tolist() == [expected.tolist()] * 2
    assert model.rows()[1].sum() == 0


@both
def test_strided_ids_count_like_contiguous_ones(kind: str) -> None:
    """Case 1.22."""
    model = model_of(kind)
    ids = random_picks(np.random.default_rng(3), 8, model)
    wide = np.zeros((8, model.layers, 5), np.int32)
    wide[:, :, : model.top_k] = ids
    work = StepWork(model.ids(wide)[:, :, : model.top_k], model.slots(range(8)), union=True)
    reduced = model.reducer.reduce(work).result()
    reference = Reference(6, 3, 8, 8)
    reference.step(ids, range(8), [])
    np.testing.assert_array_equal(model.rows(), reference.rows)
    np.testing.assert_array_equal(reduced.union, union_of(ids, 8))


@both
def test_unknown_slots_leave_the_rows_as_they_are_and_forgotten_ones_empty(kind: str) -> None:
    model = model_of(kind)
    ids = random_picks(np.random.default_rng(0), 16, model)
    model.reducer.reduce(StepWork(model.ids(ids), model.slots(range(16)))).result()
    before = model.rows()
    reduced = model.reducer.reduce(
        StepWork(model.ids(ids), None, forget=[1], wanted=np.array([3]), union=True)
    )
    assert (reduced.result().picks == -1).all()
    np.testing.assert_array_equal(model.rows()[0], before[0])
    assert model.rows()[1].sum() == 0


@both
def test_blocks_are_forgotten_in_a_step_without_tokens(kind: str) -> None:
    model = model_of(kind)
    ids = random_picks(np.random.default_rng(0), 16, model)
    model.reducer.reduce(StepWork(model.ids(ids), model.slots(range(16))))
    model.reducer.reduce(StepWork(model.ids(ids[:0]), forget=[0]))
    assert model.rows()[0].sum() == 0
    assert model.rows()[1].sum() == 8 * model.layers * model.top_k


@both
def test_without_a_cache_there_are_unions_and_picks_but_no_counts(kind: str) -> None:
    model = model_of(kind, experts=33, blocks=0)
    ids = random_picks(np.random.default_rng(0), 5, model)
    slots = np.array([40, 3, 9, 77, 8], np.int64)
    work = StepWork(model.ids(ids), slots, forget=[3], complete=[[1]], wanted=slots[[3, 0]], union=True)
    reduced = model.reducer.reduce(work).result()
    assert list(reduced.counts) == []
    np.testing.assert_array_equal(reduced.picks, ids[[3, 0]])
    np.testing.assert_array_equal(reduced.union, union_of(ids, 33))
    nothing = model.reducer.reduce(StepWork(model.ids(ids))).result()
    assert (nothing.union, nothing.picks, list(nothing.counts)) == (None, None, [])


@both
def test_more_blocks_and_tokens_than_one_pass_holds(kind: str) -> None:
    """A prompt over 40 blocks whose tokens come in one step, and as many blocks to forget."""
    model = model_of(kind, layers=1, experts=5, top_k=3, block_size=1, blocks=40)
    ids = random_picks(np.random.default_rng(0), 40, model)
    work = StepWork(model.ids(ids), model.slots(range(40)), complete=[list(range(40))], wanted=np.arange(40))
    reduced = model.reducer.reduce(work).result()
    np.testing.assert_array_equal(reduced.picks, ids)
    np.testing.assert_array_equal(reduced.counts[0][0], np.bincount(ids.ravel(), minlength=5))
    model.reducer.reduce(StepWork(model.ids(ids[:0]), forget=list(range(1, 40))))
    assert model.rows().sum() == 3


# The shell around the kernel, on a GPU or interpreted.


class CountingLink:
    """Passes on to a link and counts."""

    def __init__(self) -> None:
        if INTERPRETED:
            self.inner: Any = InterpretedLink()
        else:
            from eldr.engine.kernels.link import StreamLink

            self.inner = StreamLink(DEVICE)
        self.device = self.inner.device
        self.buffers = self.waits = 0

    def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        self.buffers += 1
        return self.inner.host_buffer(length, dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.inner.copy(target, source)

    def new_mark(self) -> Any:
        mark, link = self.inner.new_mark(), self

        class CountingMark:
            set, reached = mark.set, mark.reached

            def wait(self) -> None:
                link.waits += 1
                mark.wait()

        return CountingMark()


def counted_reducer(link: CountingLink) -> tuple[StepReducer, Callable[[int], tuple[StepWork, Any]]]:
    """A reducer over 4 blocks of 4, and a maker of steps with what they give."""
    from eldr.engine.kernels.device import DeviceReducer

    cache = SignatureCache(4, 2, 40, 4, DEVICE)

    def work(step: int) -> tuple[StepWork, Any]:
        ids = np.random.default_rng(step).permuted(np.tile(np.arange(40, dtype=np.int32), (4, 2, 1)), axis=2)[
            :, :, :3
        ]
        slots = torch.arange(4, device=DEVICE) + step % 4 * 4
        counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=40) for layer in range(2)])
        ids = np.ascontiguousarray(ids)
        return StepWork(
            torch.from_numpy(ids).to(DEVICE),
            slots,
            complete=[[step % 4]],
            wanted=np.array([step % 4 * 4]),
            union=True,
        ), (counts, union_of(ids, 40), ids[:1])

    return DeviceReducer(2, 40, 3, cache, link, 16), work


def assert_equals(reduced: Any, expected: Any) -> None:
    counts, union, picks = expected
    np.testing.assert_array_equal(reduced.counts[0], counts)
    np.testing.assert_array_equal(reduced.union, union)
    np.testing.assert_array_equal(reduced.picks, picks)


@ON_DEVICE
def test_nobody_waits_before_results_are_read_and_steps_in_flight_keep_theirs() -> None:
    link = CountingLink()
    reducer, work = counted_reducer(link)
    waits = link.waits
    steps = [work(step) for step in range(6)]
    pending = [reducer.reduce(step) for step, _ in steps]
    assert link.waits == waits
    for result, (_, expected) in reversed(list(zip(pending, steps, strict=True))):
        assert_equals(result.result(), expected)
        assert result.done
        assert_equals(result.result(), expected)
    assert link.waits == waits + 6


@ON_DEVICE
def test_a_steady_state_allocates_no_buffers() -> None:
    """Results are read one step late, as under async scheduling; every third step asks for nothing."""
    link = CountingLink()
    reducer, work = counted_reducer(link)
    before = None
    buffers = 0
    for step in range(30):
        todo, expected = work(step)
        if step % 3 == 0:
            todo = StepWork(todo.ids, todo.slots)
        now = reducer.reduce(todo)
        if before is not None:
            assert_equals(before[0].result(), before[1])
        before = None if step % 3 == 0 else (now, expected)
        if not INTERPRETED:
            torch.cuda.synchronize()
        if step == 8:
            buffers = link.buffers
    # Interpreted, the mark of a step that asked for nothing is reached at once: it has nothing to copy back.
    assert link.buffers == buffers <= 3 * 2


@ON_DEVICE
def test_results_that_are_never_read_give_up_their_buffers_and_nothing_else() -> None:
    reducer, work = counted_reducer(CountingLink())
    for step in range(5):
        reducer.reduce(work(step)[0])
    todo, expected = work(5)
    assert_equals(reducer.reduce(todo).result(), expected)


@ON_DEVICE
def test_a_step_larger_than_the_buffers_gets_larger_ones() -> None:
    from eldr.engine.kernels.device import SMALLEST_BUFFER

    link = CountingLink()
    reducer, work = counted_reducer(link)
    todo, (counts, _, _) = work(0)
    todo.complete = [[0]] * 20 + [[1] * SMALLEST_BUFFER]
    reduced = reducer.reduce(todo).result()
    for found in reduced.counts[:20]:
        np.testing.assert_array_equal(found, counts)
    assert reduced.counts[20].sum() == 0
    assert_equals(reducer.reduce(work(1)[0]).result(), work(1)[1])


if not INTERPRETED:

    @pytest.mark.engine
    @pytest.mark.timeout(600)
    def test_the_suite_passes_in_tritons_interpreter() -> None:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "engine",
                "-k",
                "not vectorised",
                "-p",
                "no:cacheprovider",
                __file__,
            ],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "--timeout=500"},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    @pytest.mark.engine
    @pytest.mark.parametrize(
        ("backend", "architecture", "warp"), [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)]
    )
    @pytest.mark.parametrize(("packed", "has_rows"), [(True, True), (False, True), (True, False)])
    def test_the_kernel_compiles_for_gpus_where_none_is(
        backend: str,
        architecture: Any,
        warp: int,
        packed: bool,
        has_rows: bool,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        """Adds go out without waiting for their old values, and between them and what reads them lies a barrier."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from eldr.engine.kernels.fused import SHARD, reduce_step

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        constants = {
            "LAYERS": 48, "EXPERTS": 128, "TOP_K": 8, "ROW": 128, "BLOCK_SIZE": 16, "PACKED": packed,
            "HAS_ROWS": has_rows, "PICKS": 8, "TILE": 128, "SHARD": SHARD,
        }  # fmt: skip
        pointers = {"ids": "*i32", "slots": "*i64", "plan": "*i64", "words": "*i32", "out": "*i32"}
        pointers["cells"] = "*u8" if packed else "*i32"
        signature = {
            name: "constexpr" if name in constants else pointers.get(name, "i32")
            for name in reduce_step.arg_names
        }
        compiled = triton.compile(
            ASTSource(reduce_step, signature, constexprs=constants),
            target=GPUTarget(backend, architecture, warp),
            options={"num_warps": 8, "enable_fp_fusion": True},
        )
        code = compiled.asm["ptx" if backend == "cuda" else "amdgcn"]
        add, barrier = ("red.global", "bar.sync") if backend == "cuda" else ("global_atomic_add", "s_barrier")
        assert (add in code) is has_rows
        if has_rows:
            assert barrier in code[: code.index(add)]
            assert barrier in code[code.rindex(add) :]
