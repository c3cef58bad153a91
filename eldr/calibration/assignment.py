"""Optimal assignment of rows to clusters of bounded size, exact, in O(rows * clusters) memory.

A transportation problem with one unit per row. Its dual has one price per cluster, so that the usual square problem
over replicated slots (Malinen and Fränti 2014) is never built: given the prices, every row goes to the cluster where
cost + price is least. Prices near the optimum come from a few steps of the auction below; what then is still too
full or too empty is mended exactly, along shortest paths of the residual graph, whose nodes are the clusters alone:
its edge j -> k costs what the cheapest row of j loses by a move to k.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRICE_STEPS = 30
"""Steps of the search for prices. More of them cost more than the paths that they save."""


class AssignmentError(ValueError):
    """Costs or sizes that no assignment can be computed for."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """`labels` int64 [rows]; `cost`, the sum that is least; `prices` float64 [clusters], a start for similar costs.

    Prices prove the optimum: no row has a cluster of lower cost + price, a cluster with a positive price is full,
    and one with a negative price has its least size.
    """

    labels: Ints
    cost: float
    prices: Floats


def balanced_sizes(rows: int, clusters: int) -> tuple[Ints, Ints]:
    """Least and largest sizes that differ by at most one; which clusters get the extra row is left open."""
    return np.full(clusters, rows // clusters), np.full(clusters, -(-rows // clusters))


def optimal_assignment(
    costs: Floats, least: npt.ArrayLike, most: npt.ArrayLike, prices: Floats | None = None
) -> Assignment:
    """Labels that minimise the sum of costs [rows, clusters], sizes within `least` and `most` [clusters].

    `prices` of an assignment of similar costs make it faster, and change the result only among equal optima.
    Raises AssignmentError for values that are not finite, naming the row, and for sizes that nothing fits.
    """
    costs = np.ascontiguousarray(costs, np.float64)
    _check_costs(costs)
    low, high = _checked_sizes(costs.shape, least, most)
    # No optimal price exceeds a path's length; larger ones would only swallow the costs' last digits.
    longest = len(low) * float(np.ptp(costs, axis=1).max())
    if prices is None or prices.shape != low.shape or not (np.abs(prices) <= longest).all():
        prices = np.zeros(len(low))
    return _Flow(costs, low, high, _searched(costs, low, high, prices)).solved()


def balanced_assignment(costs: Floats, prices: Floats | None = None) -> Assignment:
    """`optimal_assignment` with sizes that differ by at most one."""
    if costs.ndim != 2 or 0 in costs.shape:
        raise AssignmentError(f"costs must be [rows, clusters], got shape {costs.shape}")
    return optimal_assignment(costs, *balanced_sizes(*costs.shape), prices)


def _check_costs(costs: Floats) -> None:
    if costs.ndim != 2 or 0 in costs.shape:
        raise AssignmentError(f"costs must be [rows, clusters], got shape {costs.shape}")
    bad = np.flatnonzero(~np.isfinite(costs).all(axis=1))
    if bad.size:
        raise AssignmentError(f"row {bad[0]}: costs must be finite ({bad.size} such rows)")


def _checked_sizes(shape: tuple[int, ...], least: npt.ArrayLike, most: npt.ArrayLike) -> tuple[Ints, Ints]:
    rows, clusters = shape
    low, high = (np.broadcast_to(np.asarray(sizes, np.int64), clusters) for sizes in (least, most))
    wrong = np.flatnonzero((low < 0) | (high < low))
    if wrong.size:
        k = int(wrong[0])
        raise AssignmentError(f"cluster {k}: sizes must be 0 <= least <= most, got {low[k]} and {high[k]}")
    if not low.sum() <= rows <= high.sum():
        raise AssignmentError(f"{rows} rows do not fit clusters of {low.sum()} to {high.sum()} rows in all")
    return low, high


def _searched(costs: Floats, low: Ints, high: Ints, prices: Floats) -> Floats:
    """Better prices by steps along the gradient of the dual, each cluster's own step halved where it turns back."""
    spread = float(np.ptp(costs, axis=1).mean())
    if spread == 0.0 or len(low) == 1:
        return prices
    step = np.full(len(low), spread / 4)
    best, fewest = prices, np.inf
    before = np.zeros(len(low))
    for _ in range(PRICE_STEPS):
        sizes = np.bincount((costs + prices).argmin(axis=1), minlength=len(low))
        excess = sizes - np.clip(sizes, low, high)
        misplaced = float(np.abs(excess).sum())
        if misplaced < fewest:
            best, fewest = prices, misplaced
        if not misplaced:
            break
        # A price that is no longer needed falls back towards 0.
        idle = (excess == 0) & (((prices > 0) & (sizes < high)) | ((prices < 0) & (sizes > low)))
        sign = np.where(idle, -np.sign(prices), np.sign(excess))
        step = np.where(sign * before < 0, step / 2, np.minimum(step * 1.2, spread))
        size = np.where(
            idle, np.minimum(step, np.abs(prices)), step * np.minimum(1.0, np.abs(excess) / low.clip(1))
        )
        prices = prices + sign * size
        before = np.where(sign == 0, before, sign)
    return best


class _Flow:
    """Units on their way from rows over clusters (nodes 0..K-1) to the drain (node K).

    `drained` is how many units each cluster passes on, within its sizes; a cluster that holds more than it passes on
    has an excess, one that holds less a deficit, and the drain wants one unit per row. Invariant, complementary
    slackness: reduced costs w[u, v] + price[v] - price[u] of residual edges are not negative. So a flow without
    excess is optimal.
    """

    def __init__(self, costs: Floats, low: Ints, high: Ints, prices: Floats) -> None:
        self.costs, self.low, self.high = costs, low, high
        rows, clusters = costs.shape
        self.clusters = clusters
        self.price = np.append(prices, 0.0)
        self.labels = (costs + prices).argmin(axis=1)
        self.members = [np.flatnonzero(self.labels == k) for k in range(clusters)]
        sizes = np.array([len(members) for members in self.members])
        self.drained = np.where(prices > 0, high, np.where(prices < 0, low, np.clip(sizes, low, high)))
        self.excess = np.append(sizes - self.drained, self.drained.sum() - rows)
        self.edge = np.full((clusters + 1, clusters + 1), np.inf)
        self.mover = np.full((clusters, clusters), -1)
        for k in range(clusters):
            self._renew_drain(k)
            self._renew(k, np.delete(np.arange(clusters), k))

    def _renew_drain(self, k: int) -> None:
        """Recomputes k's edges to and from the drain."""
        self.edge[k, self.clusters] = 0.0 if self.drained[k] < self.high[k] else np.inf
        self.edge[self.clusters, k] = 0.0 if self.drained[k] > self.low[k] else np.inf

    def _renew(self, k: int, others: Ints) -> None:
        """Recomputes the edges from k to these other clusters."""
        members = self.members[k]
        if not len(members):
            self.edge[k, others] = np.inf
            self.mover[k, others] = -1
            return
        loss = self.costs[members[:, None], others]
        loss -= self.costs[members, k][:, None]
        cheapest = loss.argmin(axis=0)
        self.edge[k, others] = loss[cheapest, np.arange(len(others))]
        self.mover[k, others] = members[cheapest]

    def solved(self) -> Assignment:
        while (self.excess > 0).any():
            self._augment()
        price = self.price[:-1] - self.price[-1]
        cost = float(self.costs[np.arange(len(self.labels)), self.labels].sum())
        return Assignment(self.labels.astype(np.int64), cost, price)

    def _augment(self) -> None:
        """Sends units from excesses to deficits along paths of one shortest-path tree.

        With prices lowered by the distances every edge of the tree has reduced cost 0, so that a unit along any of
        its paths keeps the invariant, as long as the edges are still there for the next path.
        """
        distance, previous = self._distances()
        reached = np.isfinite(distance)
        self.price -= np.where(reached, distance, distance[reached].max())
        tree = self.edge.copy()
        ends = np.flatnonzero((self.excess < 0) & reached)
        for end in ends[np.argsort(distance[ends], kind="stable")]:
            path = [int(end)]
            while previous[path[-1]] >= 0:
                path.append(int(previous[path[-1]]))
            path.reverse()
            if (
                self.excess[path[0]] > 0
                and (self.edge[path[:-1], path[1:]] <= tree[path[:-1], path[1:]]).all()
            ):
                self._send(path)

    def _distances(self) -> tuple[Floats, Ints]:
        """Length of a shortest path from any excess to each node, and the node before it there (-1: none)."""
        reduced = self.edge + self.price[None, :] - self.price[:, None]
        np.maximum(reduced, 0.0, out=reduced)
        distance = np.where(self.excess > 0, 0.0, np.inf)
        previous = np.full(len(distance), -1)
        while True:
            through = distance[:, None] + reduced
            via = through.argmin(axis=0)
            shorter = through[via, np.arange(len(via))]
            better = shorter < distance
            if not better.any():
                return distance, previous
            distance[better] = shorter[better]
            previous[better] = via[better]

    def _send(self, path: list[int]) -> None:
        self.excess[path[0]] -= 1
        self.excess[path[-1]] += 1
        moves = []
        for here, there in pairwise(path):
            if there == self.clusters:
                self.drained[here] += 1
                self._renew_drain(here)
            elif here == self.clusters:
                self.drained[there] -= 1
                self._renew_drain(there)
            else:
                moves.append((int(self.mover[here, there]), here, there))
        for row, here, there in moves:
            self._move(row, here, there)

    def _move(self, row: int, here: int, there: int) -> None:
        self.labels[row] = there
        members = self.members[here]
        self.members[here] = members[members != row]
        orphaned = np.flatnonzero(self.mover[here] == row)
        if orphaned.size:
            self._renew(here, orphaned)
        self.members[there] = np.append(self.members[there], row)
        loss = self.costs[row] - self.costs[row, there]
        cheaper = loss < self.edge[there, :-1]
        cheaper[there] = False
        self.edge[there, :-1][cheaper] = loss[cheaper]
        self.mover[there, cheaper] = row
