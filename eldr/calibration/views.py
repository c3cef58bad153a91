"""What pictures of a fit are drawn from: pure measures of counts and unit rows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse.linalg import svds

Float32Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """The two first principal components: `rows` [rows, 2], `centroids` [clusters, 2], and their variance shares."""

    rows: Floats
    centroids: Floats
    explained: tuple[float, float]


def projection(rows: Float32Array, centroids: Float32Array) -> Projection:
    """Principal components of unit rows [rows, dimensions]; centroids [clusters, dimensions] go along.

    Equal arguments give equal results: the start is fixed, and the largest loading of a component is positive.
    Raises ValueError for fewer than 3 rows or dimensions, or rows that are all equal.
    """
    mean = rows.mean(axis=0, dtype=np.float64)
    centred = rows - mean
    total = float((centred**2).sum())
    if min(rows.shape) < 3 or total < 1e-9:
        raise ValueError(f"needs 3 rows and 3 dimensions that differ, got {rows.shape}")
    _, scale, axes = svds(centred, k=2, v0=np.ones(min(rows.shape)))
    axes, scale = axes[np.argsort(-scale)], np.sort(scale)[::-1]
    largest = np.abs(axes).argmax(axis=1)
    axes = axes * np.where(axes[[0, 1], largest] < 0, -1.0, 1.0)[:, None]
    first, second = (scale**2 / total).tolist()
    return Projection(centred @ axes.T, (centroids - mean) @ axes.T, (first, second))


def purity(labels: Sequence[int] | Ints, domains: Sequence[str]) -> float:
    """Share of labelled requests whose domain is the most frequent one of their cluster."""
    tallies: dict[int, Counter[str]] = {}
    for label, domain in zip(labels, domains, strict=True):
        if domain:
            tallies.setdefault(int(label), Counter())[domain] += 1
    together = sum(tally.total() for tally in tallies.values())
    return sum(max(tally.values()) for tally in tallies.values()) / together if together else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PrefillDecode:
    """Shares of a layer's picks per request and expert, [requests, layers * experts], and how they correlate.

    `correlations`: Pearson over requests, one per expert and layer that varies in both.
    """

    prefill: Floats
    decode: Floats
    correlations: Floats


def prefill_decode(prefill_counts: npt.NDArray[Any], decode_counts: npt.NDArray[Any]) -> PrefillDecode:
    """Shares of counts [requests, layers, experts], over the requests that generated something.

    The correlation per expert of normalised prefill and decode activation (ELDR, section 2). Raises ValueError
    where fewer than 3 requests generated anything, or no expert varies.
    """
    decoded = decode_counts.sum(axis=(1, 2)) > 0
    if decoded.sum() < 3:
        raise ValueError(f"needs 3 requests that generated something, got {decoded.sum()}")
    prefill, decode = (_shares(counts[decoded]) for counts in (prefill_counts, decode_counts))
    a, b = prefill - prefill.mean(axis=0), decode - decode.mean(axis=0)
    spread = np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0))
    varies = spread > 1e-12
    if not varies.any():
        raise ValueError("no expert is used differently by any two requests")
    return PrefillDecode(prefill, decode, (a * b).sum(axis=0)[varies] / spread[varies])


def _shares(counts: npt.NDArray[Any]) -> Floats:
    totals = counts.sum(axis=2, keepdims=True, dtype=np.float64)
    shares: Floats = (counts / np.maximum(totals, 1.0)).reshape(len(counts), -1)
    return shares
