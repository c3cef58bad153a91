"""What a decoder reports of itself."""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MAX_REQUESTS = 1 << 17
"""Most requests that a decoder may say it has: tables over batch sizes grow with them."""

MAX_KV_TOKENS = 1 << 40


class StateError(ValueError):
    """A report that cannot be true."""


@dataclass(frozen=True, slots=True)
class DecoderTotals:
    """Totals since the decoder's process started: two reports give exact means over the time between.

    `union_tokens` is the sum over decode steps of (decode tokens * distinct experts, mean over MoE layers),
    so that union_tokens / decode_tokens is the mean expert union weighted by batch. Raises StateError on
    numbers that are not finite or negative.
    """

    decode_steps: int = 0
    decode_tokens: int = 0
    union_tokens: float = 0.0
    step_time_s: float = 0.0
    late_transfer_notices: int = 0
    capture_misses: int = 0
    refused_transfers: int = 0
    unchecked_transfers: int = 0

    def __post_init__(self) -> None:
        for name in ("union_tokens", "step_time_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise StateError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderState:
    """One report of a decoder. Field meanings as in `protos/eldr/v1/decode.proto`.

    `hit_frequency` is float32 [layers, experts], the probability that a decode step touches the expert, or
    None before the first decode step. Raises StateError on numbers that are not finite or out of range.
    """

    worker_id: str
    incarnation: str
    sequence: int
    age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0
    step_time_ewma_s: float = 0.0
    step_time_last_s: float = 0.0
    batch_last: int = 0
    union_last: float = 0.0
    hit_frequency: npt.NDArray[np.float32] | None = None
    reservation_ids: frozenset[str] = frozenset()
    draining: bool = False
    placement_version: int = 0
    totals: DecoderTotals = field(default_factory=DecoderTotals)

    def __post_init__(self) -> None:
        for name in ("age_s", "kv_usage", "step_time_ewma_s", "step_time_last_s", "union_last"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise StateError(f"{self.worker_id}: {name} must be finite and not negative, got {value}")
        for name in ("sequence", "running", "waiting", "kv_tokens", "batch_last"):
            if getattr(self, name) < 0:
                raise StateError(f"{self.worker_id}: {name} must not be negative, got {getattr(self, name)}")
        for name, most in (
            ("running", MAX_REQUESTS),
            ("waiting", MAX_REQUESTS),
            ("batch_last", MAX_REQUESTS),
            ("kv_tokens", MAX_KV_TOKENS),
        ):
            if getattr(self, name) > most:
                raise StateError(
                    f"{self.worker_id}: {name} must be at most {most}, got {getattr(self, name)}"
                )
        hit = self.hit_frequency
        if hit is not None and (
            hit.ndim != 2 or not np.isfinite(hit).all() or hit.min() < 0 or hit.max() > 1
        ):
            raise StateError(f"{self.worker_id}: hit_frequency must be [layers, experts] within 0 and 1")
