"""A histogram of values that are observed on one thread."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket and the sum. `bounds` are the upper ends of the buckets, ascending; a last one is open."""

    def __init__(self, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds must ascend, got {list(bounds)}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Takes one value in."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: upper end and number of values up to it; the last is `+Inf`, all values."""
        out, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out
