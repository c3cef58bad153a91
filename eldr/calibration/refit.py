"""New centroids for changed traffic or a changed fleet, under frozen weights and mask.

Warm start from the centroids in force, then an optimal matching of the new ones to the decoders, so that a refit
moves as little traffic as it can (the published artifact's online refit).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from eldr.calibration.alignment import alignment
from eldr.calibration.kmeans import Clustering, KMeansError, spherical_kmeans

Float32Array = npt.NDArray[np.float32]

_UNIT_TOLERANCE = 1e-3


class RefitError(ValueError):
    """Settings out of range, or decoders that cannot be told apart."""


class RefitOutcome(Enum):
    """How a refit ended; all but REFITTED keep the centroids in force."""

    REFITTED = "refitted"
    WINDOW_TOO_SMALL = "window-too-small"
    TOO_FEW_DISTINCT = "too-few-distinct"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Centroids:
    """Unit rows, float32 [clusters, dimensions], and the worker id that owns each.

    Without `owners` decoder i of D, in order of worker id, owns the rows k with k % D == i, or row i % K where
    D > K, as in a profile.
    """

    rows: Float32Array
    owners: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RefitSettings:
    """`rows_per_decoder` is the least window for a refit; `restarts` and `seed` are for a start without centroids.

    Raises RefitError naming field, value and range.
    """

    rows_per_decoder: int = 4
    max_iterations: int = 20
    restarts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("rows_per_decoder", 1, 1_000),
            ("max_iterations", 1, 1_000),
            ("restarts", 1, 100),
            ("seed", 0, 2**64 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise RefitError(f"{name} must be {least} to {most}, got {value}")


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """`centroids` are the new ones, or those in force where nothing was refitted (None where there are none).

    `rows` counts the window's usable rows, `dropped` those that were not finite or had no norm; `shift` is the mean
    of 1 - cosine between a decoder's old and new centroid, NaN without an old one; `detail` says why not.
    """

    outcome: RefitOutcome
    centroids: Centroids | None
    rows: int
    dropped: int = 0
    shift: float = float("nan")
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refitter:
    """Window in, centroids out: deterministic, keeps nothing between calls."""

    settings: RefitSettings = RefitSettings()

    def refit(
        self,
        window: Float32Array,
        centroids: Centroids | None,
        decoders: Sequence[str],
        weights: Mapping[str, float] | None = None,
    ) -> Refit:
        """One centroid per decoder from the unit rows of a window [rows, dimensions].

        `decoders` are worker ids; the result does not depend on their order. `weights` give a faster decoder a
        larger cluster. Decoders that stay start from their centroid, those that joined from the rows farthest from
        all starts; the centroid of one that left is dropped. Raises RefitError for equal or no decoders.
        """
        names = sorted(decoders)
        if not names or len(set(names)) < len(names):
            raise RefitError(f"decoders must be distinct and at least one, got {list(decoders)}")
        rows = usable_rows(window)
        dropped = len(window) - len(rows)
        if len(rows) < self.settings.rows_per_decoder * len(names):
            least = self.settings.rows_per_decoder * len(names)
            detail = f"{len(rows)} usable signatures, {len(names)} decoders need {least}"
            return Refit(RefitOutcome.WINDOW_TOO_SMALL, centroids, len(rows), dropped, detail=detail)
        old = owned_rows(centroids, names, rows.shape[1])
        shares = [weights[name] for name in names] if weights is not None else None
        try:
            found = self._cluster(rows, old, names, shares)
        except KMeansError as error:
            return Refit(RefitOutcome.FAILED, centroids, len(rows), dropped, detail=str(error))
        if found.distinct < len(names):
            detail = f"{found.distinct} distinct signatures for {len(names)} decoders"
            return Refit(RefitOutcome.TOO_FEW_DISTINCT, centroids, len(rows), dropped, detail=detail)
        new = found.centroids
        if old and shares is None:
            nowhere = np.zeros(rows.shape[1], np.float32)
            new = new[alignment(new, np.stack([old.get(name, nowhere) for name in names]))]
        shifts = [1.0 - float(new[i] @ old[name]) for i, name in enumerate(names) if name in old]
        shift = float(np.mean(shifts)) if shifts else float("nan")
        return Refit(RefitOutcome.REFITTED, Centroids(new, tuple(names)), len(rows), dropped, shift)

    def _cluster(
        self,
        rows: Float32Array,
        old: Mapping[str, Float32Array],
        names: list[str],
        weights: Sequence[float] | None,
    ) -> Clustering:
        settings = self.settings
        return spherical_kmeans(
            rows,
            len(names),
            seed=settings.seed,
            restarts=settings.restarts,
            max_iterations=settings.max_iterations,
            weights=weights,
            start=_start(rows, [old.get(name) for name in names]) if old else None,
        )


def usable_rows(window: Float32Array) -> Float32Array:
    """The rows [rows, dimensions] that are finite and of norm 1, in their order."""
    squares = np.einsum("nd,nd->n", window, window, dtype=np.float64)
    usable = np.abs(np.sqrt(squares) - 1.0) <= _UNIT_TOLERANCE  # False for NaN
    return window if usable.all() else window[usable]


def owned_rows(
    centroids: Centroids | None, decoders: Sequence[str], dimensions: int
) -> dict[str, Float32Array]:
    """The unit row that each decoder has now; those that have none, or of other dimensions, are left out."""
    if centroids is None or centroids.rows.shape[1] != dimensions:
        return {}
    if centroids.owners:
        rows = dict(zip(centroids.owners, centroids.rows, strict=True))
        return {name: rows[name] for name in decoders if name in rows}
    sums = {
        name: centroids.rows[position :: len(decoders)].sum(axis=0)
        for position, name in enumerate(sorted(decoders))
        if position < len(centroids.rows)
    }
    norms = {name: float(np.linalg.norm(row)) for name, row in sums.items()}
    return {name: row / norms[name] for name, row in sums.items() if norms[name] > _UNIT_TOLERANCE}


def _start(rows: Float32Array, old: Sequence[Float32Array | None]) -> Float32Array:
    """The old centroids, and for each decoder without one the row that is farthest from all starts so far."""
    start = np.zeros((len(old), rows.shape[1]), np.float32)
    nearest = np.full(len(rows), -np.inf, np.float32)
    for decoder, row in enumerate(old):
        if row is not None:
            start[decoder] = row
            nearest = np.maximum(nearest, rows @ start[decoder])
    for decoder, row in enumerate(old):
        if row is None:
            start[decoder] = rows[int(nearest.argmin())]
            nearest = np.maximum(nearest, rows @ start[decoder])
    return start
