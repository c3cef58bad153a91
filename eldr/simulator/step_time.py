"""How long a decode step takes, as the simulated hardware has it."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """T(n, U) = factor(n) * (base + per_request * n + per_expert * U) / speed, in milliseconds.

    n: requests in the batch; U: distinct experts per layer, mean over layers. `factors` gives the factor from a batch
    size on, for kernels whose time jumps at some sizes. Raises ValueError on numbers that make no time.
    """

    base_ms: float
    per_request_ms: float
    per_expert_ms: float
    speed: float = 1.0
    factors: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("base_ms", "per_request_ms", "per_expert_ms"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        if self.base_ms + self.per_request_ms + self.per_expert_ms <= 0:
            raise ValueError("a step must take some time")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"speed must be above 0, got {self.speed}")
        if list(self.factors) != sorted(self.factors) or any(factor <= 0 for _, factor in self.factors):
            raise ValueError(f"factors must ascend in batch size and be above 0, got {self.factors}")

    def seconds(self, batch: int, union: float) -> float:
        """Seconds of one step."""
        place = bisect.bisect_right(self.factors, (batch, math.inf))
        factor = self.factors[place - 1][1] if place else 1.0
        linear = self.base_ms + self.per_request_ms * batch + self.per_expert_ms * union
        return factor * linear / self.speed / 1e3


MODELS: Mapping[str, StepTime] = {
    "synthetic": StepTime(8.0, 0.02, 0.14),
    "testbed": StepTime(8.0, 0.02, 0.25),
    "gpt-oss-20b": StepTime(4.0, 0.03, 0.5),
    "cpu-engine": StepTime(11.2, 1.29, 0.65),
}
"""By name: the synthetic world's, those of the trace comparisons (16 U/E ms of 32 experts), the CPU engine's."""
