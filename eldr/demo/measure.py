"""From timed rounds to the figures of one policy. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from eldr.demo.client import Completion
from eldr.demo.step_log import StepSample


@dataclass(frozen=True, slots=True)
class Meter:
    """Totals of all decoders at one moment, or their growth between two.

    `union_tokens` is the sum over decode steps of batch * distinct experts (mean over MoE layers), counted by
    the decoders from their own picks; `cpu_s` is the CPU time of their process trees.
    """

    decode_tokens: int
    union_tokens: float
    cpu_s: float

    def since(self, before: "Meter") -> "Meter":
        """Growth since an earlier reading."""
        return Meter(
            self.decode_tokens - before.decode_tokens,
            self.union_tokens - before.union_tokens,
            self.cpu_s - before.cpu_s,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round under one policy."""

    policy: str
    completions: tuple[Completion, ...]
    meter: Meter
    steps: tuple[StepSample, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of one policy over its rounds; NaN where nothing was measured.

    Times in milliseconds; `union_mean` is the mean number of distinct experts per MoE layer and decode step,
    weighted by batch.
    """

    tpot_p50_ms: float
    tpot_p95_ms: float
    tpot_p99_ms: float
    ttft_p50_ms: float
    union_mean: float
    cpu_ms_per_token: float
    requests: int
    errors: int


def figures_by_policy(rounds: Sequence[Round]) -> dict[str, PolicyFigures]:
    """Figures of every policy, in the order of their first rounds."""
    names = dict.fromkeys(one.policy for one in rounds)
    return {name: _figures([one for one in rounds if one.policy == name]) for name in names}


def steps_by_policy(rounds: Sequence[Round]) -> dict[str, tuple[StepSample, ...]]:
    """Samples of decode steps of every policy, in the order of their first rounds."""
    names = dict.fromkeys(one.policy for one in rounds)
    return {name: tuple(step for one in rounds if one.policy == name for step in one.steps) for name in names}


def _figures(rounds: Sequence[Round]) -> PolicyFigures:
    answers = [answer for one in rounds for answer in one.completions]
    good = [answer for answer in answers if not answer.error]
    tokens = sum(len(answer.token_ids) for answer in good)
    decode_tokens = sum(one.meter.decode_tokens for one in rounds)
    p50, p95, p99 = _percentiles_ms((answer.tpot_s for answer in good), (50, 95, 99))
    (ttft,) = _percentiles_ms((answer.first_s for answer in good), (50,))
    return PolicyFigures(
        tpot_p50_ms=p50,
        tpot_p95_ms=p95,
        tpot_p99_ms=p99,
        ttft_p50_ms=ttft,
        union_mean=_ratio(sum(one.meter.union_tokens for one in rounds), decode_tokens),
        cpu_ms_per_token=_ratio(1000 * sum(one.meter.cpu_s for one in rounds), tokens),
        requests=len(answers),
        errors=len(answers) - len(good),
    )


def _percentiles_ms(seconds: Iterable[float], ranks: tuple[int, ...]) -> list[float]:
    values = list(seconds)
    if not values:
        return [float("nan")] * len(ranks)
    return [float(value) * 1000 for value in np.percentile(values, ranks)]


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else float("nan")
