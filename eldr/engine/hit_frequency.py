"""How often recent decode steps touched each expert."""

import threading

import numpy as np
import numpy.typing as npt

FOLD_AT = 64
"""Steps that may wait before the engine's thread folds them itself, where nobody reads."""


class HitFrequency:
    """Exponentially weighted share of decode steps that touched each expert, float32 [layers, experts].

    The newest step has weight 1 / `window_steps`; the first one counts in full. Steps are only kept when they are
    added, and folded together when somebody reads: beside a decode step, which leaves the processor's caches cold,
    each array operation costs a hundred times what it costs in a row.
    """

    def __init__(self, window_steps: int) -> None:
        self._weight = 1.0 / window_steps
        self._steps: list[npt.NDArray[np.bool_]] = []
        self._hit: npt.NDArray[np.float32] | None = None
        self._lock = threading.Lock()

    def add(self, union: npt.NDArray[np.bool_]) -> None:
        """One decode step: touched experts, bool [layers, experts]. The array is kept."""
        with self._lock:
            self._steps.append(union)
            if len(self._steps) >= FOLD_AT:
                self._fold()

    def read(self) -> npt.NDArray[np.float32] | None:
        """The share after all steps so far; None before the first. Any thread; the array never changes."""
        with self._lock:
            if self._steps:
                self._fold()
            return self._hit

    def _fold(self) -> None:
        bits = np.stack(self._steps)
        self._steps.clear()
        if self._hit is None:
            self._hit, bits = bits[0].astype(np.float32), bits[1:]
        keep = 1.0 - self._weight
        weights = self._weight * keep ** np.arange(len(bits) - 1, -1, -1)
        hit = keep ** len(bits) * self._hit + np.tensordot(weights, bits, 1)
        # Rounding must not carry a share above 1, which no router would accept.
        self._hit = np.minimum(hit, 1.0).astype(np.float32)
