"""Balanced spherical K-means (Malinen and Fränti 2014 on unit vectors), and the vanilla kind beside it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.calibration.assignment import balanced_assignment

Float32Array = npt.NDArray[np.float32]

_UNIT_TOLERANCE = 1e-3
_DISTINCT_DECIMALS = 6
_LEAST_GAIN = 1e-12


class KMeansError(ValueError):
    """Rows that cannot be clustered as asked."""


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Result of `spherical_kmeans`.

    `centroids` float32 [clusters, dimensions] of norm 1, numbered by the first row they own; `labels` int64
    [rows]; `objective` the mean cosine of a row with its centroid; `distinct` the number of distinct rows, to
    six decimals: where it is below the number of clusters, some centroids are equal.
    """

    centroids: Float32Array
    labels: npt.NDArray[np.int64]
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
    progress: Callable[[int], None] = lambda done: None,
) -> Clustering:
    """Clusters unit rows [rows, dimensions] so that the mean cosine to the centroids is largest.

    Balanced: sizes differ by at most one and each assignment is optimal under that. Else every row goes to
    its nearest centroid, and a cluster left empty restarts at the row that fits its own centroid worst. Each
    restart begins with k-means++ and ends when the labels or the objective stop changing, or after
    `max_iterations`; the best restart wins. Equal arguments give equal results. `progress` hears how many
    restarts are done.

    Raises KMeansError, naming values and rows, for rows that are not finite or not of norm 1, for fewer rows
    than clusters, and for numbers out of range.
    """
    _check(rows, clusters, restarts, max_iterations)
    best: Clustering | None = None
    distinct = _count_distinct(rows)
    for restart in range(restarts):
        rng = np.random.default_rng([seed, restart])
        found = _run(rows, _plus_plus(rows, clusters, rng), max_iterations, balanced, distinct)
        if best is None or found.objective > best.objective:
            best = found
        progress(restart + 1)
    assert best is not None
    return _numbered_by_first_row(best)


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
    return len({(np.round(row, _DISTINCT_DECIMALS) + 0.0).tobytes() for row in rows})


def _plus_plus(rows: Float32Array, clusters: int, rng: np.random.Generator) -> Float32Array:
    """k-means++ start: the next centroid is a row drawn with probability proportional to 1 - cosine."""
    picked = [int(rng.integers(len(rows)))]
    distance = _distance(rows, rows[picked[0]])
    while len(picked) < clusters:
        total = distance.sum()
        if total > 0:
            row = int(rng.choice(len(rows), p=distance / total))
        else:  # every row equals a picked one: take any row that is not picked yet
            row = int(rng.choice(np.setdiff1d(np.arange(len(rows)), picked)))
        picked.append(row)
        distance = np.minimum(distance, _distance(rows, rows[row]))
    return rows[picked]


def _distance(rows: Float32Array, centroid: Float32Array) -> npt.NDArray[np.float64]:
    distance: npt.NDArray[np.float64] = np.maximum(0.0, 1.0 - (rows @ centroid).astype(np.float64))
    distance[distance < 10.0**-_DISTINCT_DECIMALS] = 0.0
    return distance


def _run(
    rows: Float32Array, centroids: Float32Array, max_iterations: int, balanced: bool, distinct: int
) -> Clustering:
    labels = np.full(len(rows), -1, dtype=np.int64)
    objective = -np.inf
    converged = False
    iterations = 0
    while iterations < max_iterations and not converged:
        iterations += 1
        cosines = (rows @ centroids.T).astype(np.float64)
        proposal = balanced_assignment(1.0 - cosines) if balanced else _nearest(cosines)
        reached = float(cosines[np.arange(len(rows)), proposal].mean())
        converged = bool((proposal == labels).all()) or reached <= objective + _LEAST_GAIN
        if not converged:
            labels, objective = proposal, reached
            centroids = _means(rows, labels, centroids)
    cosines = np.einsum("nd,nd->n", rows, centroids[labels], dtype=np.float64)
    return Clustering(centroids, labels, float(cosines.mean()), iterations, converged, distinct)


def _nearest(cosines: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Label of the largest cosine [rows, clusters]; no cluster stays empty."""
    labels: npt.NDArray[np.int64] = cosines.argmax(axis=1).astype(np.int64)
    sizes = np.bincount(labels, minlength=cosines.shape[1])
    own = cosines[np.arange(len(labels)), labels]
    for cluster in np.flatnonzero(sizes == 0):
        movable = np.where(sizes[labels] > 1, own, np.inf)
        row = int(movable.argmin())
        sizes[labels[row]] -= 1
        labels[row] = cluster
        sizes[cluster] = 1
    return labels


def _means(rows: Float32Array, labels: npt.NDArray[np.int64], previous: Float32Array) -> Float32Array:
    """Mean directions; a cluster whose rows cancel out keeps its centroid."""
    centroids = previous.copy()
    for cluster in range(len(previous)):
        mean = rows[labels == cluster].sum(axis=0, dtype=np.float64)
        norm = float(np.linalg.norm(mean))
        if norm > _UNIT_TOLERANCE:
            centroids[cluster] = mean / norm
    return centroids


def _numbered_by_first_row(found: Clustering) -> Clustering:
    _, first = np.unique(found.labels, return_index=True)
    order = np.argsort(first)
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
