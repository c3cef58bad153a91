"""How far live traffic is from what a profile was fitted on.

Three measures, each against the calibration's own figure. Distance: 1 - cosine to the nearest centroid, of live rows
against calibration's quantiles. Occupancy: the share of rows that each centroid is nearest to. rho: as in
`eldr.signature.quality`, where decode counts of live requests are known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.calibration.fit_record import ClusterRecord
from eldr.signature.quality import pair_products, request_pairs, spearman

Float32Array = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

QUANTILES = tuple(percent / 100 for percent in range(101))
"""Probabilities at which a profile keeps the distances of its calibration rows."""
OUTSIDE_QUANTILE = 0.95
MIN_ROWS = 50
"""Fewer live rows are not compared: the share outside would be known to no better than 3 points."""
OUTSIDE_LIMIT = 0.35
"""Share of live rows beyond the calibration's 95 % distance above which a refit pays; docs/drift.md derives it."""
OCCUPANCY_LIMIT = 0.2
"""Total variation of the occupancy above which a refit pays; docs/drift.md derives it."""


class DriftError(ValueError):
    """Nothing to compare: too few rows, or a profile without its calibration's distances."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """`distances` are the quantiles at QUANTILES, `nearest` the rows per nearest centroid."""

    distances: tuple[float, ...]
    nearest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Live rows against the calibration.

    `outside` is the share of rows farther from every centroid than 95 % of the calibration's rows (0.05 where
    nothing changed), `distance_ks` the largest gap between the two distributions of distances (0 to 1),
    `occupancy_tv` the total variation between the shares per nearest centroid (0 to 1). `rho` is None where no decode
    counts are known.
    """

    rows: int
    outside: float
    distance_ks: float
    distance_median: float
    calibration_median: float
    occupancy: tuple[float, ...]
    occupancy_tv: float
    rho: float | None = None

    @property
    def refit_pays(self) -> bool:
        """Whether `outside` or `occupancy_tv` is over its limit."""
        return self.outside > OUTSIDE_LIMIT or self.occupancy_tv > OCCUPANCY_LIMIT

    @property
    def advice(self) -> str:
        """One sentence."""
        reasons = []
        if self.outside > OUTSIDE_LIMIT:
            reasons.append(
                f"{self.outside:.0%} of the signatures lie outside the calibration (limit {OUTSIDE_LIMIT:.0%})"
            )
        if self.occupancy_tv > OCCUPANCY_LIMIT:
            reasons.append(
                f"clusters are filled differently by {self.occupancy_tv:.2f} (limit {OCCUPANCY_LIMIT:.2f})"
            )
        if reasons:
            return "a refit pays: " + ", ".join(reasons)
        return "within limits: the profile fits this traffic"


def nearest(rows: Float32Array, centroids: Float32Array) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Distance of each unit row [rows, dimensions] to its nearest centroid [clusters, dimensions], and its number."""
    cosines = rows @ centroids.T
    found = cosines.argmax(axis=1).astype(np.int64)
    return 1.0 - cosines[np.arange(len(rows)), found].astype(np.float64), found


def baseline(rows: Float32Array, centroids: Float32Array) -> Baseline:
    """What a profile keeps of the rows that it was fitted on; rows as in `nearest`, at least one."""
    distances, found = nearest(rows, centroids)
    sizes = np.bincount(found, minlength=len(centroids))
    return Baseline(tuple(np.quantile(distances, QUANTILES).tolist()), tuple(sizes.tolist()))


def drift(
    rows: Float32Array, centroids: Float32Array, record: ClusterRecord, rho: float | None = None
) -> Drift:
    """Compares unit rows [rows, dimensions] with the fit that made `record` and `centroids` [clusters, dimensions].

    Raises DriftError for fewer than MIN_ROWS rows, rows that are not finite or of another dimension, and for a
    profile that keeps no distances.
    """
    if len(record.distances) != len(QUANTILES) or len(record.nearest) != len(centroids):
        raise DriftError("the profile keeps no distances of its calibration: fit it again")
    if len(rows) < MIN_ROWS:
        raise DriftError(f"{len(rows)} live signatures, at least {MIN_ROWS} are compared")
    if rows.shape[1] != centroids.shape[1]:
        raise DriftError(f"rows have {rows.shape[1]} dimensions, the centroids {centroids.shape[1]}")
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        raise DriftError(f"row {bad[0]} is not finite ({bad.size} such rows)")
    distances, found = nearest(rows, centroids)
    kept = np.asarray(record.distances)
    shares = np.bincount(found, minlength=len(centroids)) / len(rows)
    before = np.asarray(record.nearest) / max(1, sum(record.nearest))
    return Drift(
        rows=len(rows),
        outside=float((distances > kept[round(OUTSIDE_QUANTILE * 100)]).mean()),
        distance_ks=_largest_gap(distances, kept),
        distance_median=float(np.median(distances)),
        calibration_median=float(kept[50]),
        occupancy=tuple(shares.tolist()),
        occupancy_tv=float(np.abs(shares - before).sum() / 2),
        rho=rho,
    )


def live_rho(rows: Float32Array, decode_counts: npt.NDArray[Any], max_pairs: int = 30_000) -> float:
    """rho of live pairs: unit rows [requests, dimensions] against decode counts [requests, layers, experts].

    Raises DriftError for fewer than MIN_ROWS requests with decode counts; others must be left out before.
    """
    if len(rows) != len(decode_counts) or len(rows) < MIN_ROWS:
        raise DriftError(f"rho needs {MIN_ROWS} requests with decode counts, got {len(rows)}")
    pairs = request_pairs(len(rows), max_pairs, 0)
    decode = pair_products(decode_counts.astype(np.float32), pairs)
    live = pair_products(rows[:, None, :], pairs)
    return float(spearman(live.distances([0]), decode.distances(range(decode_counts.shape[1]))))


def _largest_gap(distances: Floats, quantiles: Floats) -> float:
    """Kolmogorov-Smirnov distance between live distances and a distribution known by its quantiles at QUANTILES."""
    ordered = np.sort(distances)
    expected = np.interp(ordered, quantiles, QUANTILES, left=0.0, right=1.0)
    after = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(max(np.abs(after - expected).max(), np.abs(after - 1 / len(ordered) - expected).max()))
