"""What the linear part of the step-time model leaves: break points in the batch size, and slower decoders."""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


class BatchCorrection:
    """Factor g(n) on the step time: a table over batch sizes in steps of half an octave, linear between.

    An entry is the mean log residual there, forgotten slowly and shrunk to its neighbours and to 0 until it
    has data. Kernels that change with the batch size make step times that no line follows (the published TPOT
    falls from 60 to 100 requests a second).
    """

    ENTRIES = 24
    """Batches up to 2^11.5 = 2,896."""

    FORGETTING = 0.998
    PRIOR_WEIGHT = 10.0
    LARGEST_LOG = 0.5

    def __init__(self) -> None:
        self._weight = np.zeros(self.ENTRIES)
        self._sum = np.zeros(self.ENTRIES)
        self._log = np.zeros(self.ENTRIES)
        near = np.abs(np.subtract.outer(np.arange(self.ENTRIES), np.arange(self.ENTRIES)))
        self._kernel: Vector = np.where(near <= 2, 0.2**near, 0.0)

    def observe(self, batch: float, log_residual: float, weight: float) -> None:
        """`log_residual` is the log of the observed over the linear step time."""
        place = _place(batch, self.ENTRIES)
        low = int(place)
        share = place - low
        self._weight *= self.FORGETTING
        self._sum *= self.FORGETTING
        for entry, part in ((low, 1 - share), (min(low + 1, self.ENTRIES - 1), share)):
            self._weight[entry] += part * weight
            self._sum[entry] += part * weight * log_residual
        smooth = (self._kernel @ self._sum) / (self._kernel @ self._weight + self.PRIOR_WEIGHT)
        self._log = np.clip(smooth, -self.LARGEST_LOG, self.LARGEST_LOG)

    def factor(self, batch: float) -> float:
        """g(n)."""
        place = _place(batch, self.ENTRIES)
        low = int(place)
        high = min(low + 1, self.ENTRIES - 1)
        return math.exp(self._log[low] + (place - low) * (self._log[high] - self._log[low]))

    def factors(self, batch: Vector) -> Vector:
        """g(n), float64 [batches]."""
        place = 2 * np.log2(np.maximum(batch, 1.0))
        out: Vector = np.exp(np.interp(place, np.arange(self.ENTRIES), self._log))
        return out


def _place(batch: float, entries: int) -> float:
    return min(2 * math.log2(max(batch, 1.0)), entries - 1.0)


@dataclass(slots=True)
class _Residuals:
    weight: float = 0.0
    sum: float = 0.0
    squares: float = 0.0


class DecoderSpeeds:
    """Factor s of one decoder: its mean log residual against the group's, as far as it is certain.

    Successive residuals of one decoder hang together (CORRELATED of them tell as much as one), and a factor is
    shrunk by (2 standard errors / its size)^2, so that a fleet whose step times differ from minute to minute
    for reasons that routing cannot influence has factors of 1, and a slower machine has its own within seconds.
    """

    FORGETTING = 0.98
    CORRELATED = 8.0
    LARGEST_LOG = 1.5

    def __init__(self) -> None:
        self._residuals: dict[str, _Residuals] = {}
        self._means: list[float] = []
        """Mean residuals of all decoders with data, ascending, so that the median costs no sort per report."""
        self._speeds: dict[str, float] = {}

    def speed(self, worker_id: str) -> float:
        """1 for a decoder without data."""
        return self._speeds.get(worker_id, 1.0)

    @property
    def uneven(self) -> bool:
        """Whether any decoder is certain to differ."""
        return bool(self._speeds)

    def forget(self, worker_id: str) -> None:
        """Drops a decoder."""
        mine = self._residuals.pop(worker_id, None)
        if mine is not None:
            self._drop_mean(mine)
        self._speeds.pop(worker_id, None)

    def observe(self, worker_id: str, log_residual: float, weight: float) -> None:
        """`log_residual` is the log of the observed step time over that of the group's model."""
        mine = self._residuals.setdefault(worker_id, _Residuals())
        self._drop_mean(mine)
        mine.weight = self.FORGETTING * mine.weight + weight
        mine.sum = self.FORGETTING * mine.sum + weight * log_residual
        mine.squares = self.FORGETTING * mine.squares + weight * log_residual**2
        if not mine.weight > 0:
            return
        mean, means = mine.sum / mine.weight, self._means
        insort(means, mean)
        if len(means) < 2:
            return
        offset = mean - means[(len(means) - 1) // 2]
        variance = max(0.0, mine.squares / mine.weight - mean**2) + 0.02**2
        certain = 1.0 - 4.0 * variance * self.CORRELATED / (mine.weight * max(offset**2, 1e-12))
        shrunk = offset * max(0.0, certain)
        if shrunk:
            self._speeds[worker_id] = math.exp(min(max(shrunk, -self.LARGEST_LOG), self.LARGEST_LOG))
        else:
            self._speeds.pop(worker_id, None)

    def _drop_mean(self, residuals: _Residuals) -> None:
        if residuals.weight > 0:
            del self._means[bisect_left(self._means, residuals.sum / residuals.weight)]
