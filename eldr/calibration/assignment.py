"""Optimal assignment of rows to clusters of equal capacity."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

MAX_ROWS = 8_192
"""Above this the solver's square matrix would pass 512 MiB."""


class AssignmentError(ValueError):
    """Costs that no assignment can be computed for."""


def balanced_assignment(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Labels [rows] that minimise the sum of costs [rows, clusters], with sizes that differ by at most one.

    Exact: a Hungarian solve on replicated slots (Malinen and Fränti 2014). Each cluster has floor(N/K) slots
    that must be filled and, unless K divides N, one slot that may stay free; which clusters get the extra row
    is part of the optimum. O((N + K)^2) memory. Raises AssignmentError for values that are not finite, naming
    the row, and for more than MAX_ROWS rows.
    """
    if costs.ndim != 2 or 0 in costs.shape:
        raise AssignmentError(f"costs must be [rows, clusters], got shape {costs.shape}")
    rows, clusters = costs.shape
    if rows > MAX_ROWS:
        raise AssignmentError(f"rows must be at most {MAX_ROWS} for an exact solve, got {rows}")
    bad = np.flatnonzero(~np.isfinite(costs).all(axis=1))
    if bad.size:
        raise AssignmentError(f"row {bad[0]}: costs must be finite ({bad.size} such rows)")
    floor, extra = divmod(rows, clusters)
    owners = np.repeat(np.arange(clusters), floor)
    if not extra:
        _, slots = linear_sum_assignment(costs[:, owners])
        return owners[slots].astype(np.int64)
    owners = np.concatenate([owners, np.arange(clusters)])
    square = np.full((len(owners), len(owners)), np.inf)
    square[:rows] = costs[:, owners]
    square[rows:, clusters * floor :] = 0.0  # the K - extra free slots, taken by rows that do not exist
    _, slots = linear_sum_assignment(square)
    return owners[slots[:rows]].astype(np.int64)
