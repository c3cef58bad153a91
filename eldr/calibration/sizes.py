"""How many rows each cluster may have."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eldr.calibration.assignment import AssignmentError

Ints = npt.NDArray[np.int64]


def cluster_sizes(
    rows: int,
    clusters: int,
    weights: Sequence[float] | None = None,
    least: int | None = None,
    most: int | None = None,
) -> tuple[Ints, Ints]:
    """Least and largest size of each cluster, int64 [clusters] both.

    In proportion to `weights` [clusters], for decoders of unequal speed, and off by less than one row; equal
    weights give sizes that differ by at most one. Which clusters get the extra rows is left to the assignment.
    `least` and `most` replace that by a range for all clusters, where one of them is given the other is open.
    Raises AssignmentError for weights that are not finite and positive, and for sizes that nothing fits.
    """
    if least is not None or most is not None:
        if weights is not None:
            raise AssignmentError("give weights, or least and most sizes, not both")
        low, high = 0 if least is None else least, rows if most is None else most
        if not 0 <= low <= high:
            raise AssignmentError(f"sizes must be 0 <= least <= most, got {low} and {high}")
        if not low * clusters <= rows <= high * clusters:
            raise AssignmentError(f"{clusters} clusters of {low} to {high} rows cannot hold {rows} rows")
        return np.full(clusters, low), np.full(clusters, high)
    shares = np.asarray(weights if weights is not None else np.ones(clusters), np.float64)
    if shares.shape != (clusters,):
        raise AssignmentError(
            f"weights must be {clusters} numbers, one per cluster, got shape {shares.shape}"
        )
    if not (np.isfinite(shares).all() and (shares > 0).all()):
        raise AssignmentError(f"weights must be finite and positive, got {shares.tolist()}")
    exact = rows * (shares / shares.sum())
    # Rounding must not turn a whole share into one of two sizes.
    whole = np.rint(exact)
    near = np.abs(exact - whole) < 1e-9 * max(rows, 1)
    low = np.where(near, whole, np.floor(exact)).astype(np.int64)
    high = np.where(near, whole, np.ceil(exact)).astype(np.int64)
    return low, high
