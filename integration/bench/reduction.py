"""Time of a step's reduction (eldr.engine.kernels) against the plain torch form and against a compiled loop.

    python -m integration.bench reduction [--device cuda] [--pairs 40] [--json FILE]

`before` is one int64 index per pick and torch's scatter_add_, a gather and a sum per finished prompt, and a scatter
for the union, with the results taken to the host at once. `after` is the implementation for the device. `floor` is
the same arithmetic as a loop that Numba compiles, where Numba is installed and the device is a CPU. The three take
turns; figures are medians in milliseconds, with the 5th and 95th percentile of the ratio before / after.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eldr.engine.kernels import reducer_for
from eldr.engine.kernels.contract import StepWork
from eldr.engine.signature_cache import SignatureCache


@dataclass(frozen=True, slots=True)
class Case:
    """One step of a model. `complete` prompts of `blocks` blocks end in it; `union`: it is a decode step."""

    name: str
    tokens: int
    layers: int
    experts: int
    top_k: int
    block_size: int
    complete: int = 0
    blocks: int = 0
    union: bool = False


CASES = (
    Case("count 2048 tokens, 48 x 128, top 8", 2048, 48, 128, 8, 16),
    Case("count 512 tokens, 6 x 64, top 4", 512, 6, 64, 4, 32),
    Case("sum 512 blocks, 48 x 128", 0, 48, 128, 8, 16, complete=1, blocks=512),
    Case("union of 32 tokens, 48 x 128, top 8", 32, 48, 128, 8, 16, union=True),
    Case("2048 tokens, 4 prompts of 128 blocks end", 2048, 48, 128, 8, 16, complete=4, blocks=128),
)


class Before:
    """The reduction in torch operations, one after the other."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.rows = torch.zeros((640, case.layers, case.experts), dtype=torch.uint8, device=device)
        self.offset = (torch.arange(case.layers, device=device) * case.experts).view(1, case.layers, 1)

    def __call__(self, ids: torch.Tensor, slots: torch.Tensor, complete: list[list[int]]) -> None:
        case, rows = self.case, self.rows
        if case.tokens and not case.union:
            real = slots >= 0
            block = torch.div(slots, case.block_size, rounding_mode="floor").clamp_min_(0)
            rows[block[(slots % case.block_size == 0) & real]] = 0
            cells = case.layers * case.experts
            index = block.view(-1, 1, 1) * cells + self.offset + ids.clamp_min(0)
            known = (ids >= 0) & real.view(-1, 1, 1)
            rows.view(-1).scatter_add_(0, index.reshape(-1), known.reshape(-1).to(rows.dtype))
        for blocks in complete:
            rows.index_select(0, torch.as_tensor(blocks, device=rows.device)).sum(
                0, dtype=torch.int32
            ).cpu().numpy()
        if case.union:
            touched = torch.zeros((case.layers, case.experts + 1), dtype=torch.bool, device=ids.device)
            flat = ids.permute(1, 0, 2).reshape(case.layers, -1).long()
            touched.scatter_(1, torch.where(flat < 0, case.experts, flat), True)
            np.packbits(touched.cpu().numpy()[:, : case.experts], axis=1)


def floor_of(case: Case) -> Callable[..., None]:
    """The reduction as a loop compiled by Numba."""
    from numba import njit

    @njit(nogil=True)
    def loop(
        rows: Any, ids: Any, slots: Any, block_size: int, blocks: Any, ends: Any, counts: Any, touched: Any
    ) -> None:
        tokens, layers, top_k = ids.shape
        count = touched.shape[0] == 0
        for token in range(tokens):
            slot = slots[token]
            if count and slot >= 0 and slot % block_size == 0:
                rows[slot // block_size] = 0
        for token in range(tokens):
            block = slots[token] // block_size
            for layer in range(layers):
                for pick in range(top_k):
                    expert = ids[token, layer, pick]
                    if 0 <= expert < rows.shape[2]:
                        if count:
                            rows[block, layer, expert] += 1
                        else:
                            touched[layer, expert] = True
        for prompt in range(ends.size - 1):
            counts[:] = 0
            for block in blocks[ends[prompt] : ends[prompt + 1]]:
                for layer in range(layers):
                    for expert in range(rows.shape[2]):
                        counts[layer, expert] += rows[block, layer, expert]

    rows = np.zeros((640, case.layers, case.experts), np.uint8)
    counts = np.zeros((case.layers, case.experts), np.int32)
    touched = np.zeros((case.layers if case.union else 0, case.experts), bool)

    def run(ids: torch.Tensor, slots: torch.Tensor, complete: list[list[int]]) -> None:
        blocks = np.concatenate([np.empty(0, np.int64), *map(np.asarray, complete)]).astype(np.int64)
        ends = np.cumsum([0, *map(len, complete)])
        loop(rows, ids.numpy(), slots.numpy(), case.block_size, blocks, ends, counts, touched)

    return run


def measure(case: Case, device: str, pairs: int) -> dict[str, Any]:
    """Medians of the forms, taking turns."""
    rng = np.random.default_rng(0)
    ranks = rng.random((case.tokens, case.layers, case.experts)).argsort(axis=2)
    ids = torch.from_numpy(ranks[:, :, : case.top_k].astype(np.int32)).to(device)
    slots = torch.arange(case.tokens, device=device)
    complete = [list(map(int, rng.permutation(640)[: case.blocks])) for _ in range(case.complete)]
    cache = SignatureCache(640, case.layers, case.experts, case.block_size, device)
    reducer = reducer_for(device, case.layers, case.experts, case.top_k, cache)

    def after(ids: torch.Tensor, slots: torch.Tensor, complete: list[list[int]]) -> None:
        known = None if case.union else slots
        reducer.reduce(StepWork(ids, known, complete=complete, union=case.union)).result()

    forms: dict[str, Callable[..., None]] = {"before": Before(case, device), "after": after}
    if device == "cpu" and find_spec("numba"):
        forms["floor"] = floor_of(case)
    clock = time.thread_time if device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(pairs + 3):
        for name, form in forms.items():
            if device != "cpu":
                torch.cuda.synchronize()
            begin = clock()
            form(ids, slots, complete)
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append((clock() - begin) * 1e3)
    ratios = np.array(times["before"]) / np.array(times["after"])
    return {
        "case": case.name,
        **{f"{name}_ms": round(statistics.median(values), 4) for name, values in times.items()},
        "ratio": round(float(np.median(ratios)), 2),
        "ratio_p5": round(float(np.percentile(ratios, 5)), 2),
        "ratio_p95": round(float(np.percentile(ratios, 95)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=40, help="times that the forms take turns (default 40)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(case, arguments.device, arguments.pairs) for case in CASES]
    print(f"{'step':42} {'before':>9} {'after':>9} {'floor':>9}   ratio (p5 to p95)")
    for row in results:
        floor = f"{row['floor_ms']:9.3f}" if "floor_ms" in row else f"{'-':>9}"
        spread = f"{row['ratio']:.1f} ({row['ratio_p5']:.1f} to {row['ratio_p95']:.1f})"
        print(f"{row['case']:42} {row['before_ms']:9.3f} {row['after_ms']:9.3f} {floor}   {spread}")
    if arguments.json:
        machine = {"device": arguments.device, "machine": platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(
            json.dumps({**machine, "pairs": arguments.pairs, "steps": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
