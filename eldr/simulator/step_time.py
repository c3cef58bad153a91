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
    "qwen3-30b": StepTime(7.718, 0.0, 0.1506, factors=((33, 1.19), (65, 1.07), (97, 1.18))),
    "gpt-oss-120b": StepTime(15.649, 0.0456, 0.2044, factors=((33, 1.16), (65, 1.2))),
    "gemma-4-26b": StepTime(5.158, 0.1011, 0.1305, factors=((33, 1.05), (65, 0.88))),
}
"""By name: the synthetic world's, those of the trace comparisons (16 U/E ms of 32 experts), the CPU engine's,
and three fitted to published medians (arXiv 2607.00466, artifact `casys-kaist/ELDR`, results
`main_task.csv`, 8P16D on MI300X, TP 1): TPOT P50 of round-robin and of Domain on the task mix at 20, 40,
60, 80 and 100 requests/s.

The batch is Little's, rate / 16 * 512 tokens * TPOT; the union is the one that a batch of that size has in
the synthetic world (top-4 for GPT-OSS), mixed for round-robin and of one domain for Domain. Base, per
request and per expert by non-negative least squares of the relative error, factors on a grid of 0.01
(`python -m integration.bench published --fit`). Mean and largest error on the ten medians: 1.7 and 2.6 %
(Qwen3), 0.6 and 1.2 % (GPT-OSS), 3.1 and 6.1 % (Gemma).

Qwen3 and Gemma get slower and faster again as the load grows, so their kernels have break points; the
medians only say that they lie between 24 and 45 and between 52 and 61 or 65. 33 and 65 are taken for all
three, sizes at which the tails of `random`, whose batches vary, jump too. Qwen3's from 97 on comes from one
figure, the P99 of `random` at 100 requests/s (28.8 ms).
"""
