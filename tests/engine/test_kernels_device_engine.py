"""The host's side of the GPU kernel: nobody waits, nothing is allocated; and the kernel compiles for GPUs.

Runs on a GPU (`-m gpu`), and interpreted by a test of test_kernels_engine.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_models import DEVICE, INTERPRETED, ON_DEVICE, InterpretedLink, union_of

from eldr.engine.kernels.contract import StepReducer, StepWork
from eldr.engine.signature_cache import SignatureCache


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
