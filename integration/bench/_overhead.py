"""The arithmetic of integration/bench/capture.py: paired overheads with their spread, and bytes per KV block."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Overhead:
    """Median of the pairs' extra fractions (0.01 = 1 % more), and its bootstrap interval."""

    median: float
    low: float
    high: float


def overhead(without: Sequence[float], with_eldr: Sequence[float], seed: int = 0) -> Overhead:
    """Median of `with_eldr / without - 1` over pairs, and the percentile bootstrap interval of that median.

    Raises ValueError for lists of different lengths, empty ones, and times that are not above 0.
    """
    if len(without) != len(with_eldr) or not len(without):
        raise ValueError(f"pairs need two lists of one length, got {len(without)} and {len(with_eldr)}")
    base, eldr = np.asarray(without, np.float64), np.asarray(with_eldr, np.float64)
    if not (np.isfinite([base, eldr]).all() and base.min() > 0 and eldr.min() > 0):
        raise ValueError("times must be finite and above 0")
    extra: npt.NDArray[np.float64] = eldr / base - 1
    drawn = np.random.default_rng(seed).integers(0, extra.size, (RESAMPLES, extra.size))
    tails = [50 * (1 - LEVEL), 100 - 50 * (1 - LEVEL)]
    low, high = np.percentile(np.median(extra[drawn], axis=1), tails)
    return Overhead(float(np.median(extra)), float(low), float(high))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What decides the bytes of a KV block and of its signature row. `element_bytes`: of one KV number."""

    layers: int
    moe_layers: int
    experts: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int

    @property
    def kv_block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes
        return per_token * self.block_size


QWEN3_30B_A3B = CacheShape(
    layers=48, moe_layers=48, experts=128, kv_heads=4, head_dim=128, element_bytes=2, block_size=16
)


def row_over_kv(shape: CacheShape, row_bytes: int) -> float:
    """Signature-cache bytes as a fraction of the KV bytes; `row_bytes`: of one block's row."""
    return row_bytes / shape.kv_block_bytes
