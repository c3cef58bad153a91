"""Balanced spherical K-means (Malinen and Fränti 2014 on unit vectors), and the vanilla kind beside it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.calibration.assignment import AssignmentError, optimal_assignment
from eldr.calibration.sizes import cluster_sizes

Float32Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SCREEN_ROWS = 2_000
"""Restarts are compared on a seeded sample of this many rows; the best one goes on with all of them."""

_UNIT_TOLERANCE = 1e-3
_DISTINCT_DECIMALS = 6
_DISTINCT_COLUMNS = 64
_LEAST_GAIN = 1e-12


class KMeansError(ValueError):
    """Rows that cannot be clustered as asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Result of `spherical_kmeans`.

    `centroids` float32 [clusters, dimensions] of norm 1, numbered by the first row they own, or as the start was;
    `labels` int64 [rows]; `objective` the mean cosine of a row with its centroid; `distinct` the number of distinct
    rows, to six decimals: where it is below the number of clusters, some centroids are equal.
    """

    centroids: Float32Array
    labels: Ints
    objective: float
    iterations: int
    converged: bool
    distinct: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows per cluster."""
        return tuple(np.bincount(self.labels, minlength=len(self.centroids)).tolist())


def spherical_kmeans(
    rows: Float32Array,
    clusters: int,
    *,
    seed: int = 0,
    restarts: int = 8,
    max_iterations: int = 50,
    balanced: bool = True,
    weights: Sequence[float] | None = None,
    least: int | None = None,
    most: int | None = None,
    start: Float32Array | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Clustering:
    """Clusters unit rows [rows, dimensions] so that the mean cosine to the centroids is largest.

    Balanced: sizes are in proportion to `weights` [clusters] (default: equal) and differ from it by less than one,
    or lie within `least` and `most` where those are given; each assignment is optimal under that. Not balanced:
    every row goes to its nearest centroid, and a cluster left empty restarts at the row that fits its own worst.
    Each restart begins with k-means++ and ends when the labels or the objective stop changing, or after
    `max_iterations`; the best restart wins. Of more than SCREEN_ROWS rows a sample decides which. `start`
    [clusters, dimensions] replaces restarts by one run from these centroids, whose numbers stay.
    Equal arguments give equal results. `progress` hears how many restarts are done.

    O(rows * (dimensions + clusters)) memory. Raises KMeansError, naming values and rows, for rows that are not
    finite or not of norm 1, for fewer rows than clusters, for sizes that nothing fits and numbers out of range.
    """
    _check(rows, clusters, restarts, max_iterations)
    rows = np.ascontiguousarray(rows, np.float32)
    bounds = _bounds(len(rows), clusters, balanced, weights, least, most)
    distinct = _count_distinct(rows)
    if start is not None:
        if start.shape != (clusters, rows.shape[1]) or not np.isfinite(start).all():
            raise KMeansError(
                f"start must be finite, of shape {(clusters, rows.shape[1])}, got {start.shape}"
            )
        found = _run(_Space(rows), rows @ np.asarray(start, np.float32).T, max_iterations, bounds)
        progress(restarts)
        return found.clustering(rows, start, distinct)
    if len(rows) > SCREEN_ROWS >= clusters:
        drawn = np.random.default_rng(seed).choice(len(rows), SCREEN_ROWS, replace=False)
        sample = rows[np.sort(drawn)]
        some = _bounds(len(sample), clusters, balanced, weights, None, None)
        screened = _best(sample, clusters, seed, restarts, max_iterations, some, progress)
        first = screened.clustering(sample, None, 0).centroids
        found = _run(_Space(rows), rows @ first.T, max_iterations, bounds)
        return _numbered_by_first_row(found.clustering(rows, first, distinct))
    found = _best(rows, clusters, seed, restarts, max_iterations, bounds, progress)
    return _numbered_by_first_row(found.clustering(rows, None, distinct))


Bounds = tuple[Ints, Ints] | None


def _bounds(
    rows: int,
    clusters: int,
    balanced: bool,
    weights: Sequence[float] | None,
    least: int | None,
    most: int | None,
) -> Bounds:
    if not balanced:
        if weights is not None or least is not None or most is not None:
            raise KMeansError("weights and sizes need balanced clusters")
        return None
    try:
        return cluster_sizes(rows, clusters, weights, least, most)
    except AssignmentError as error:
        raise KMeansError(str(error)) from error


@dataclass(slots=True, eq=False)
class _Found:
    """A run's end."""

    labels: Ints
    objective: float
    iterations: int
    converged: bool
    clusters: int

    def clustering(self, rows: Float32Array, previous: Float32Array | None, distinct: int) -> Clustering:
        """With centroids: mean directions; a cluster whose rows cancel out keeps its previous one, or a row."""
        sums = _sums(rows, self.labels, self.clusters)
        norms = np.linalg.norm(sums, axis=1)
        centroids = np.empty((self.clusters, rows.shape[1]), np.float32)
        for cluster in range(self.clusters):
            if norms[cluster] > _UNIT_TOLERANCE:
                centroids[cluster] = sums[cluster] / norms[cluster]
            elif previous is not None:
                centroids[cluster] = previous[cluster]
            else:
                centroids[cluster] = rows[np.flatnonzero(self.labels == cluster)[:1]].sum(0)
        own = np.empty(len(rows))
        for cluster in range(self.clusters):
            mine = np.flatnonzero(self.labels == cluster)
            own[mine] = rows[mine] @ centroids[cluster]
        return Clustering(
            centroids, self.labels, float(own.mean()), self.iterations, self.converged, distinct
        )


class _Space:
    """Cosines of all rows with mean directions, from the rows themselves."""

    def __init__(self, rows: Float32Array) -> None:
        self._rows = rows
        self._labels: Ints | None = None
        self._sums = np.empty((0, 0))

    def cosines(self, labels: Ints, previous: Float32Array) -> Float32Array:
        """Cosines [rows, clusters] with the clusters' means; a column whose rows cancel out stays as it was."""
        sums = self._sums_of(labels, previous.shape[1]).copy()
        norms = np.linalg.norm(sums, axis=1)
        usable = norms > _UNIT_TOLERANCE
        sums[usable] /= norms[usable, None]
        cosines = self._rows @ sums.astype(np.float32).T
        return cosines if usable.all() else np.where(usable, cosines, previous)

    def _sums_of(self, labels: Ints, clusters: int) -> Floats:
        """Sums of the clusters' rows; where few labels changed since the last call, from the rows that moved."""
        moved = None if self._labels is None else np.flatnonzero(labels != self._labels)
        if self._labels is None or moved is None or len(moved) > len(labels) // 4:
            self._sums = _sums(self._rows, labels, clusters)
        else:
            change = _membership(labels[moved], clusters) - _membership(self._labels[moved], clusters)
            self._sums = self._sums + change.T @ self._rows[moved]
        self._labels = labels
        return self._sums


class _GramSpace:
    """The same from the products of all pairs of rows: cheaper where runs are many and rows few."""

    def __init__(self, rows: Float32Array) -> None:
        self.products = rows @ rows.T

    def cosines(self, labels: Ints, previous: Float32Array) -> Float32Array:
        """See `_Space.cosines`."""
        member = _membership(labels, previous.shape[1])
        sums = self.products @ member
        squares = np.einsum("nk,nk->k", sums, member, dtype=np.float64)
        norms = np.sqrt(np.maximum(squares, 0.0))
        usable = norms > _UNIT_TOLERANCE
        norms[~usable] = 1.0
        cosines = sums / norms.astype(np.float32)
        return cosines if usable.all() else np.where(usable, cosines, previous)


def _best(
    rows: Float32Array,
    clusters: int,
    seed: int,
    restarts: int,
    max_iterations: int,
    bounds: Bounds,
    progress: Callable[[int], None],
) -> _Found:
    space = _GramSpace(rows) if len(rows) <= SCREEN_ROWS else _Space(rows)
    best: _Found | None = None
    for restart in range(restarts):
        rng = np.random.default_rng([seed, restart])
        products = _plus_plus(rows, space, clusters, rng)
        found = _run(space, products, max_iterations, bounds)
        if best is None or found.objective > best.objective:
            best = found
        progress(restart + 1)
    assert best is not None
    return best


def _check(rows: Float32Array, clusters: int, restarts: int, max_iterations: int) -> None:
    if rows.ndim != 2 or 0 in rows.shape:
        raise KMeansError(f"rows must be [rows, dimensions], got shape {rows.shape}")
    if not 1 <= clusters <= len(rows):
        raise KMeansError(f"clusters must be 1 to the number of rows, {len(rows)}, got {clusters}")
    if restarts < 1 or max_iterations < 1:
        raise KMeansError(
            f"restarts and max_iterations must be at least 1, got {restarts} and {max_iterations}"
        )
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
    bad = np.flatnonzero(~(np.abs(norms - 1.0) <= _UNIT_TOLERANCE))
    if bad.size:
        named = ", ".join(f"{row} (norm {norms[row]:.4g})" for row in bad[:5])
        raise KMeansError(f"rows must have norm 1; {bad.size} do not: {named}")


def _count_distinct(rows: Float32Array) -> int:
    """Distinct rows, to _DISTINCT_DECIMALS; only rows that agree in a few columns are compared in all."""

    def digests(some: Float32Array) -> list[bytes]:
        rounded = np.round(some, _DISTINCT_DECIMALS) + 0.0
        return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rounded]

    few = np.ascontiguousarray(rows[:, :: -(-rows.shape[1] // _DISTINCT_COLUMNS)])
    groups: dict[bytes, list[int]] = {}
    for row, digest in enumerate(digests(few)):
        groups.setdefault(digest, []).append(row)
    return sum(1 if len(alike) == 1 else len(set(digests(rows[alike]))) for alike in groups.values())


def _plus_plus(
    rows: Float32Array, space: "_Space | _GramSpace", clusters: int, rng: np.random.Generator
) -> Float32Array:
    """k-means++ start: the next centroid is a row drawn with probability proportional to 1 - cosine.

    Returns the cosines [rows, clusters] with the drawn rows.
    """
    columns: list[Float32Array] = []
    picked: list[int] = []
    distance = np.ones(len(rows))
    while len(picked) < clusters:
        total = distance.sum()
        if not picked:
            row = int(rng.integers(len(rows)))
        elif total > 0:
            row = int(rng.choice(len(rows), p=distance / total))
        else:  # every row equals a picked one: take any row that is not picked yet
            row = int(rng.choice(np.setdiff1d(np.arange(len(rows)), picked)))
        picked.append(row)
        cosines = space.products[row] if isinstance(space, _GramSpace) else rows @ rows[row]
        columns.append(cosines)
        here = np.maximum(0.0, 1.0 - cosines.astype(np.float64))
        here[here < 10.0**-_DISTINCT_DECIMALS] = 0.0
        distance = here if len(picked) == 1 else np.minimum(distance, here)
    return np.stack(columns, axis=1)


def _run(space: "_Space | _GramSpace", cosines: Float32Array, max_iterations: int, bounds: Bounds) -> _Found:
    labels = np.full(len(cosines), -1, dtype=np.int64)
    prices: Floats | None = None
    objective = -np.inf
    converged = False
    iterations = 0
    while iterations < max_iterations and not converged:
        iterations += 1
        if bounds is None:
            proposal = _nearest(cosines)
        else:
            assigned = optimal_assignment(1.0 - cosines.astype(np.float64), *bounds, prices)
            proposal, prices = assigned.labels, assigned.prices
        reached = float(cosines[np.arange(len(cosines)), proposal].mean(dtype=np.float64))
        converged = bool((proposal == labels).all()) or reached <= objective + _LEAST_GAIN
        if not converged:
            labels, objective = proposal, reached
            cosines = space.cosines(labels, cosines)
    own = float(cosines[np.arange(len(cosines)), labels].mean(dtype=np.float64))
    return _Found(labels, own, iterations, converged, cosines.shape[1])


def _nearest(cosines: Float32Array) -> Ints:
    """Label of the largest cosine [rows, clusters]; no cluster stays empty."""
    labels: Ints = cosines.argmax(axis=1).astype(np.int64)
    sizes = np.bincount(labels, minlength=cosines.shape[1])
    own = cosines[np.arange(len(labels)), labels]
    for cluster in np.flatnonzero(sizes == 0):
        movable = np.where(sizes[labels] > 1, own, np.inf)
        row = int(movable.argmin())
        sizes[labels[row]] -= 1
        labels[row] = cluster
        sizes[cluster] = 1
    return labels


def _membership(labels: Ints, clusters: int) -> Float32Array:
    member = np.zeros((len(labels), clusters), np.float32)
    member[np.arange(len(labels)), labels] = 1.0
    return member


def _sums(rows: Float32Array, labels: Ints, clusters: int) -> Floats:
    """Sum of each cluster's rows, float64 [clusters, dimensions]."""
    sums: Floats = (_membership(labels, clusters).T @ rows).astype(np.float64)
    return sums


def _numbered_by_first_row(found: Clustering) -> Clustering:
    _, first = np.unique(found.labels, return_index=True)
    order = np.argsort(first)
    # Clusters without a row, which sizes may allow, come last.
    order = np.append(
        np.unique(found.labels)[order], np.setdiff1d(np.arange(len(found.centroids)), found.labels)
    )
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return Clustering(
        centroids=np.ascontiguousarray(found.centroids[order]),
        labels=rank[found.labels].astype(np.int64),
        objective=found.objective,
        iterations=found.iterations,
        converged=found.converged,
        distinct=found.distinct,
    )
