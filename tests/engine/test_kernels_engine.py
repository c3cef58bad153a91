"""One suite for both implementations of the step's reduction, against a reference that loops over tokens.

The last test runs this file and the one of the kernel's shell in Triton's interpreter, in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_models import INTERPRETED, ON_DEVICE, Model, model_of, random_picks, union_of

from eldr.engine.kernels.contract import StepWork

# Each shape of a model is a compilation of its own on a GPU.
EXAMPLES = 15 if INTERPRETED or torch.cuda.is_available() else 80
BLOCK_SIZES = [1, 16, 32, 128, 255, 256]

both = pytest.mark.parametrize(
    "kind", [pytest.param("vectorised", marks=pytest.mark.engine), pytest.param("triton", marks=ON_DEVICE)]
)


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
                str(Path(__file__).with_name("test_kernels_device_engine.py")),
            ],
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": "--timeout=500"},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
