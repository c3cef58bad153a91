"""How well signatures predict decode: the rank correlation rho, and the layers that maximise it.

rho is Spearman's correlation, over pairs of requests, of the cosine distance of their signatures with the
cosine distance of their decode activation vectors (paper section 3). Greedy forward selection adds, one at a
time, the layer that raises rho most, and keeps the prefix at the peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

DISTANCE_DECIMALS = 12
"""Distances are rounded to this many decimals, so that rounding errors cannot break ties of equal requests."""

_GATHER_PAIRS = 1 << 10


class QualityError(ValueError):
    """Too few requests, or arrays that do not describe the same requests."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestPairs:
    """Distinct unordered pairs (first[p], second[p]) of `requests` requests, first < second, int64 [pairs]."""

    requests: int
    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]


def request_pairs(requests: int, limit: int, seed: int) -> RequestPairs:
    """All pairs where there are at most `limit`, else a seeded sample of `limit` of them, each at most once.

    Raises QualityError for fewer than 3 requests (two pairs have no rank correlation worth the name) and for
    a limit below 3.
    """
    if requests < 3:
        raise QualityError(f"requests must be at least 3 for a rank correlation, got {requests}")
    if limit < 3:
        raise QualityError(f"limit must be at least 3 pairs, got {limit}")
    total = requests * (requests - 1) // 2
    if total <= limit:
        code = np.arange(total, dtype=np.int64)
    else:
        code = np.random.default_rng(seed).choice(total, size=limit, replace=False, shuffle=False)
        code = np.sort(code).astype(np.int64)
    # Pair number second * (second - 1) / 2 + first; the two corrections undo rounding of the root.
    second = ((1.0 + np.sqrt(1.0 + 8.0 * code)) / 2.0).astype(np.int64)
    second -= second * (second - 1) // 2 > code
    second += second * (second + 1) // 2 <= code
    return RequestPairs(requests, code - second * (second - 1) // 2, second)


@dataclass(frozen=True, slots=True, eq=False)
class PairProducts:
    """Inner products per layer, from which the cosine of any subset of layers follows by sums.

    `dots` float64 [layers, pairs] of the two requests of each pair, `squares` float64 [layers, requests] of a
    request with itself.
    """

    pairs: RequestPairs
    dots: Float64Array
    squares: Float64Array

    def distances(self, layers: Sequence[int]) -> Float64Array:
        """Cosine distance of each pair over these layers, float64 [pairs]; see `cosine_distances`."""
        kept = list(layers)
        return cosine_distances(self.dots[kept].sum(axis=0), self.squares[kept].sum(axis=0), self.pairs)


def pair_products(vectors: npt.NDArray[Any], pairs: RequestPairs) -> PairProducts:
    """Per-layer inner products of vectors [requests, layers, experts].

    Accumulates in float64. Raises QualityError for another number of requests and, naming the first such
    request, for values that are not finite.
    """
    if vectors.ndim != 3 or len(vectors) != pairs.requests:
        raise QualityError(
            f"vectors must be [requests, layers, experts] of {pairs.requests} requests, got {vectors.shape}"
        )
    layers = vectors.shape[1]
    dots = np.empty((layers, len(pairs.first)))
    squares = np.empty((layers, pairs.requests))
    for layer in range(layers):
        plane = np.ascontiguousarray(vectors[:, layer], dtype=np.float64)
        bad = np.flatnonzero(~np.isfinite(plane).all(axis=1))
        if bad.size:
            raise QualityError(f"request {bad[0]}: values of layer {layer} are not finite")
        squares[layer] = np.einsum("ne,ne->n", plane, plane)
        for start in range(0, len(pairs.first), _GATHER_PAIRS):
            part = slice(start, start + _GATHER_PAIRS)
            dots[layer, part] = np.einsum("pe,pe->p", plane[pairs.first[part]], plane[pairs.second[part]])
    return PairProducts(pairs, dots, squares)


def cosine_distances(dots: Float64Array, squares: Float64Array, pairs: RequestPairs) -> Float64Array:
    """1 - cosine, float64 [pairs]; 1 (nothing in common) where a request's vector is zero, never NaN."""
    norms = np.sqrt(squares)
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms > 0)
    distances: Float64Array = 1.0 - dots * inverse[pairs.first] * inverse[pairs.second]
    return np.round(distances, DISTANCE_DECIMALS)


def average_ranks(values: Float64Array) -> Float64Array:
    """Ranks from 0, equal values sharing the mean of their ranks."""
    order = np.argsort(values)
    ascending = values[order]
    starts = np.flatnonzero(np.concatenate(([True], ascending[1:] != ascending[:-1])))
    ranks = np.empty(len(values))
    if len(starts) == len(values):
        ranks[order] = np.arange(len(values), dtype=np.float64)
        return ranks
    sizes = np.diff(np.append(starts, len(values)))
    ranks[order] = np.repeat(starts + (sizes - 1) / 2.0, sizes)
    return ranks


def standard_ranks(values: Float64Array) -> Float64Array:
    """Average ranks with mean 0 and L2 norm 1, all zero for constant values: their dot product is rho."""
    ranks = average_ranks(values)
    ranks -= (len(ranks) - 1) / 2.0
    norm = np.linalg.norm(ranks)
    return ranks / norm if norm > 0 else np.zeros_like(ranks)


def spearman(a: Float64Array, b: Float64Array) -> float:
    """Spearman's rank correlation with average ranks, -1 to 1; 0 where one side is constant."""
    return float(standard_ranks(a) @ standard_ranks(b))


BOOTSTRAP_DRAWS = 200


def rho_gain_interval(
    pairs: RequestPairs, mine: Float64Array, other: Float64Array, target: Float64Array, seed: int
) -> tuple[float, float]:
    """95 % interval of rho(mine, target) - rho(other, target), distances [pairs], if other requests had been drawn.

    Paired bootstrap over requests: a draw weighs each pair by how often both of its requests were drawn, and ranks
    are weighted likewise. Pairs of a request with itself do not exist.
    """
    rng = np.random.default_rng(seed)
    ranked = [_Ranked(values) for values in (mine, other, target)]
    gains = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        times = rng.multinomial(pairs.requests, np.full(pairs.requests, 1.0 / pairs.requests))
        weights = (times[pairs.first] * times[pairs.second]).astype(np.float64)
        a, b, t = (one.ranks(weights) for one in ranked)
        gains[draw] = _correlation(a, t, weights) - _correlation(b, t, weights)
    low, high = np.percentile(gains, [2.5, 97.5])
    return float(low), float(high)


class _Ranked:
    """Values sorted once, for ranks under many weights."""

    def __init__(self, values: Float64Array) -> None:
        self._order = np.argsort(values, kind="stable")
        ascending = values[self._order]
        self._starts = np.flatnonzero(np.concatenate(([True], ascending[1:] != ascending[:-1])))
        self._sizes = np.diff(np.append(self._starts, len(values)))

    def ranks(self, weights: Float64Array) -> Float64Array:
        """Weight below each value plus half the weight of its equals."""
        groups = np.add.reduceat(weights[self._order], self._starts)
        ranks = np.empty(len(weights))
        ranks[self._order] = np.repeat(np.cumsum(groups) - groups / 2, self._sizes)
        return ranks


def _correlation(a: Float64Array, b: Float64Array, weights: Float64Array) -> float:
    total = weights.sum()
    if total == 0:
        return 0.0
    a, b = a - weights @ a / total, b - weights @ b / total
    scale = np.sqrt((weights @ (a * a)) * (weights @ (b * b)))
    return float(weights @ (a * b) / scale) if scale > 0 else 0.0


def signature_quality(
    signatures: npt.NDArray[Any], decodes: npt.NDArray[Any], pairs: RequestPairs, layers: Sequence[int]
) -> float:
    """rho of weighted prefill counts over `layers` against decode counts over all layers.

    Both [requests, layers, experts]; they need not be normalised, the cosine does that.
    """
    decode_layers = range(decodes.shape[1])
    return spearman(
        pair_products(signatures, pairs).distances(layers),
        pair_products(decodes, pairs).distances(decode_layers),
    )


@dataclass(frozen=True, slots=True)
class LayerSelection:
    """Layers in the order greedy selection added them, and rho after each addition."""

    order: tuple[int, ...]
    curve: tuple[float, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The prefix at the peak of the curve (the shortest one, if several tie), ascending."""
        peak = self.curve.index(max(self.curve))
        return tuple(sorted(self.order[: peak + 1]))


def select_layers(signatures: PairProducts, decode_distances: Float64Array) -> LayerSelection:
    """Greedy forward selection over all layers; equal gains go to the lower layer.

    Raises QualityError where the two are not about the same pairs.
    """
    pairs = signatures.pairs
    if decode_distances.shape != pairs.first.shape:
        raise QualityError(
            f"decode_distances must have {len(pairs.first)} pairs, got shape {decode_distances.shape}"
        )
    target = standard_ranks(decode_distances)
    dots = np.zeros(len(pairs.first))
    squares = np.zeros(pairs.requests)
    left = list(range(len(signatures.dots)))
    order: list[int] = []
    curve: list[float] = []
    while left:
        rhos = [
            float(
                standard_ranks(
                    cosine_distances(
                        dots + signatures.dots[layer], squares + signatures.squares[layer], pairs
                    )
                )
                @ target
            )
            for layer in left
        ]
        best = left.pop(int(np.argmax(rhos)))
        dots += signatures.dots[best]
        squares += signatures.squares[best]
        order.append(best)
        curve.append(max(rhos))
    return LayerSelection(tuple(order), tuple(curve))
