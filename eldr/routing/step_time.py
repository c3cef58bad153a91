"""Step-time model of a group of like decoders, fitted online from what they report.

T = s * g(n) * (a + b*n + c*u + d*k): T is the wall time of a decode step in seconds, n its decode tokens
(requests), u the expert union as a share of all experts, mean over MoE layers (so c here is experts times the c
of `facts`: T = a + b*n + c*U), k the KV tokens held. g follows break points in the batch size
(`BatchCorrection`), s is the speed of one decoder against its group (`DecoderSpeeds`); both are 1 without data.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from eldr.routing.state import MAX_REQUESTS, DecoderState
from eldr.routing.step_residuals import BatchCorrection, DecoderSpeeds

Vector = npt.NDArray[np.float64]

LEAST_STEP_TIME_S, MOST_STEP_TIME_S = 1e-6, 3600.0
"""Step times beyond these are no decode steps, and their squares would leave the range of numbers."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Means over `steps` decode steps of one decoder: batch, union share, step time; KV tokens at their end."""

    batch: float
    union_share: float
    step_time_s: float
    steps: int
    kv_tokens: float = 0.0
    worker_id: str = ""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """T = base_s + per_request_s * n + per_union_s * u + per_kv_token_s * k, none of them negative."""

    base_s: float
    per_request_s: float
    per_union_s: float
    per_kv_token_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The model as tables over whole batch sizes: T(n) = load_s[n] + union_s[n] * u + kv_s[n] * k."""

    load_s: Vector
    union_s: Vector
    kv_s: Vector
    least_added_s: float
    """A request adds at least this much, so that load always costs, also where the curve falls with n."""


def observe(previous: DecoderState | None, state: DecoderState, experts: int) -> Observation | None:
    """What the time between two reports of one incarnation says; None where no decode step fell into it.

    Without an earlier report the last step alone is used. `experts` is the number of experts per MoE layer.
    """
    if previous is None or previous.incarnation != state.incarnation:
        steps = 1
        batch, union, step_time_s = float(state.batch_last), state.union_last, state.step_time_last_s
    else:
        steps = state.totals.decode_steps - previous.totals.decode_steps
        tokens = state.totals.decode_tokens - previous.totals.decode_tokens
        if steps <= 0 or tokens <= 0:
            return None
        batch = tokens / steps
        union = (state.totals.union_tokens - previous.totals.union_tokens) / tokens
        step_time_s = (state.totals.step_time_s - previous.totals.step_time_s) / steps
    plausible = (
        0 < batch <= MAX_REQUESTS
        and 0 < union <= experts
        and LEAST_STEP_TIME_S <= step_time_s <= MOST_STEP_TIME_S
    )
    if not plausible:
        return None
    return Observation(
        batch, union / experts, step_time_s, steps, float(state.kv_tokens), worker_id=state.worker_id
    )


class StepTimeModel:
    """Recursive least squares of relative error, with forgetting, bounded outliers and a prior.

    The prior fixes only the ratios of the coefficients: its scale is the one that fits the data best, so that
    it holds for steps of 5 ms and of 500 ms alike. It weighs as much as the noise of the observations says:
    where step times differ for reasons that are not in the model, the ratios stay near the prior's instead of
    following the noise. Coefficients never become negative, and that of n never falls below a floor: without a
    load term everything would be placed on one decoder. `observe` solves; reading costs nothing.
    """

    PRIOR = Coefficients(base_s=5e-3, per_request_s=1e-4, per_union_s=20e-3)
    """Ratios between those measured on GPUs (facts: 4, 0.03, 16) and on this project's CPU testbed (11, 1.3, 83)."""

    KV_UNIT = 5e-8
    """Seconds per KV token in which its coefficient is counted; its prior is 0."""

    FLOOR = 0.1
    """Least coefficient of n, as a share of the scaled prior's."""

    FORGETTING = 0.999
    """Weight that an observation keeps with each later one."""

    STRENGTH = 0.0025
    """Least weight of the prior: 5 % noise of an observation against 100 % doubt of a coefficient, squared."""

    TRUSTED_AFTER = 20
    """Observations before an outlier can be told."""

    SOLVE_EVERY = 32
    """Observations between two solutions, once there are SOLVE_ALWAYS."""

    SOLVE_ALWAYS = 200

    def __init__(self) -> None:
        prior = self.PRIOR
        self._prior: Vector = np.array([prior.base_s, prior.per_request_s, prior.per_union_s, self.KV_UNIT])
        self._centre = np.array([1.0, 1.0, 1.0, 0.0])
        self._normal = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._spread = 0.25
        self._least_added_s = self.FLOOR * prior.per_request_s
        self._coefficients = prior
        self._batches = BatchCorrection()
        self._speeds = DecoderSpeeds()
        self._curve: Curve | None = None
        self.observations = 0
        self.outliers = 0

    @property
    def coefficients(self) -> Coefficients:
        """The fit to what was observed so far; the prior before that."""
        return self._coefficients

    @property
    def error(self) -> float:
        """Recent mean of |observed / predicted - 1|, outliers bounded; each told before it was learned from."""
        return self._spread

    def speed(self, worker_id: str) -> float:
        """Step time of a decoder over that of its group at equal batch and union; 1 until it is certain."""
        return self._speeds.speed(worker_id)

    @property
    def uneven(self) -> bool:
        """Whether any decoder has a speed of its own."""
        return self._speeds.uneven

    def forget(self, worker_id: str) -> None:
        """Drops what is known of one decoder alone."""
        self._speeds.forget(worker_id)

    def predict(self, batch: float, union_share: float, kv_tokens: float = 0.0, worker_id: str = "") -> float:
        """Step time in seconds."""
        scale = self._batches.factor(batch) * self._speeds.speed(worker_id)
        return scale * self._linear(batch, union_share, kv_tokens)

    def curve(self, largest: int) -> Curve:
        """Tables for batches of 0 to at least `largest`; made once per solution."""
        if self._curve is None or len(self._curve.load_s) <= largest:
            fit = self._coefficients
            batch = np.arange(max(256, 1 << (largest + 1).bit_length()), dtype=np.float64)
            factor = self._batches.factors(batch)
            self._curve = Curve(
                load_s=factor * (fit.base_s + fit.per_request_s * batch),
                union_s=factor * fit.per_union_s,
                kv_s=factor * fit.per_kv_token_s,
                least_added_s=self._least_added_s,
            )
        return self._curve

    def observe(self, seen: Observation) -> None:
        """Takes one observation in. One far off the fit counts only as far as the usual spread reaches."""
        step_time_s = seen.step_time_s
        weight = min(1.0, seen.steps / 10)
        speed = self._speeds.speed(seen.worker_id)
        if self.observations >= self.TRUSTED_AFTER:
            step_time_s = self._bounded(seen)
            linear_s = self._linear(seen.batch, seen.union_share, seen.kv_tokens)
            factor = self._batches.factor(seen.batch)
            self._speeds.observe(seen.worker_id, math.log(step_time_s / (factor * linear_s)), weight)
            self._batches.observe(seen.batch, math.log(step_time_s / (speed * linear_s)), weight)
        features = np.array([1.0, seen.batch, seen.union_share, seen.kv_tokens]) * (speed / step_time_s)
        keep = self.FORGETTING**weight
        self._normal = keep * self._normal + weight * np.outer(features, features)
        self._moment = keep * self._moment + weight * features
        self.observations += 1
        if self.observations <= self.SOLVE_ALWAYS or self.observations % self.SOLVE_EVERY == 0:
            self._solve()

    def _linear(self, batch: float, union_share: float, kv_tokens: float) -> float:
        fit = self._coefficients
        return (
            fit.base_s
            + fit.per_request_s * batch
            + fit.per_union_s * union_share
            + fit.per_kv_token_s * kv_tokens
        )

    def _bounded(self, seen: Observation) -> float:
        expected_s = self.predict(seen.batch, seen.union_share, seen.kv_tokens, seen.worker_id)
        bound = 4 * self._spread
        low, high = expected_s * max(0.2, 1 - bound), expected_s * (1 + bound)
        bounded_s = min(max(seen.step_time_s, low), high)
        self.outliers += bounded_s != seen.step_time_s
        error = abs(bounded_s / expected_s - 1)
        self._spread = max(0.02, 0.9 * self._spread + 0.1 * error)
        return bounded_s

    def _solve(self) -> None:
        # In units of the scaled prior: minimise |X z - 1|^2 + strength * |z - centre|^2, z >= (0, floor, 0, 0).
        prior = self._centre * self._prior
        scale = float(prior @ self._moment) / float(prior @ self._normal @ prior)
        unit = scale * self._prior
        strength = (
            max(self.STRENGTH, self._spread**2) if self.observations > self.TRUSTED_AFTER else self.STRENGTH
        )
        normal = self._normal * np.outer(unit, unit) + strength * np.eye(4)
        moment = self._moment * unit + strength * self._centre
        floor = np.array([0.0, self.FLOOR, 0.0, 0.0])
        root = np.linalg.cholesky(normal)
        above, _ = nnls(root.T, np.linalg.solve(root, moment - normal @ floor))
        self._coefficients = Coefficients(*(unit * (above + floor)).tolist())
        self._least_added_s = self.FLOOR * float(unit[1])
        self._curve = None


class StepTimes:
    """One model per group of like decoders."""

    def __init__(self) -> None:
        self._models: dict[str, StepTimeModel] = {}

    def model(self, group: str) -> StepTimeModel:
        """The model of a group, made at first sight."""
        if group not in self._models:
            self._models[group] = StepTimeModel()
        return self._models[group]

    def forget(self, worker_id: str) -> None:
        """Drops what is known of one decoder alone."""
        for model in self._models.values():
            model.forget(worker_id)

    def items(self) -> list[tuple[str, StepTimeModel]]:
        """Groups and their models, sorted by group."""
        return sorted(self._models.items())
