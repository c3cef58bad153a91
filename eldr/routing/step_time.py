"""Step-time model T = a + b * n + c * u, fitted online from what the decoders report.

T is the wall time of a decode step in seconds, n its decode tokens (requests), u the expert union as a share
of all experts, mean over MoE layers (so c here is experts times the c of `facts`: T = a + b*n + c*U).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from eldr.routing.state import DecoderState

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observation:
    """Mean batch, union share and step time over `steps` decode steps of one decoder."""

    batch: float
    union_share: float
    step_time_s: float
    steps: int


@dataclass(frozen=True, slots=True)
class Coefficients:
    """T = base_s + per_request_s * n + per_union_s * u, all positive or zero."""

    base_s: float
    per_request_s: float
    per_union_s: float


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
    plausible = batch > 0 and 0 < union <= experts and step_time_s > 0 and math.isfinite(step_time_s)
    return Observation(batch, union / experts, step_time_s, steps) if plausible else None


class StepTimeModel:
    """Recursive least squares of relative error, with forgetting, bounded outliers and a prior.

    The prior fixes only the ratios of the three coefficients: its scale is the one that fits the data best,
    so that it holds for steps of 5 ms and of 500 ms alike. Coefficients never become negative, and that of n
    never falls below a floor: without a load term everything would be placed on one decoder.
    """

    PRIOR = Coefficients(base_s=5e-3, per_request_s=1e-4, per_union_s=20e-3)
    """Ratios between those measured on GPUs (facts: 4, 0.03, 16) and on this project's CPU testbed (11, 1.3, 83)."""

    FLOOR = 0.1
    """Least coefficient of n, as a share of the scaled prior's."""

    FORGETTING = 0.999
    """Weight that an observation keeps with each later one."""

    STRENGTH = 0.0025
    """Weight of the prior: 5 % noise of an observation against 100 % doubt of a coefficient, squared."""

    TRUSTED_AFTER = 20
    """Observations before an outlier can be told."""

    def __init__(self) -> None:
        prior = self.PRIOR
        self._prior: Vector = np.array([prior.base_s, prior.per_request_s, prior.per_union_s])
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._spread = 0.25
        self._solved: Coefficients | None = prior
        self.observations = 0
        self.outliers = 0

    @property
    def coefficients(self) -> Coefficients:
        """The fit to what was observed so far; the prior before that."""
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def observe(self, seen: Observation) -> None:
        """Takes one observation in. One far off the fit counts only as far as the usual spread reaches."""
        step_time_s = seen.step_time_s
        if self.observations >= self.TRUSTED_AFTER:
            step_time_s = self._bounded(seen)
        features = np.array([1.0, seen.batch, seen.union_share]) / step_time_s
        weight = min(1.0, seen.steps / 10)
        keep = self.FORGETTING**weight
        self._normal = keep * self._normal + weight * np.outer(features, features)
        self._moment = keep * self._moment + weight * features
        self.observations += 1
        self._solved = None

    def _bounded(self, seen: Observation) -> float:
        fit = self.coefficients
        expected_s = fit.base_s + fit.per_request_s * seen.batch + fit.per_union_s * seen.union_share
        bound = 4 * self._spread
        low, high = expected_s * max(0.2, 1 - bound), expected_s * (1 + bound)
        bounded_s = min(max(seen.step_time_s, low), high)
        self.outliers += bounded_s != seen.step_time_s
        error = abs(bounded_s / expected_s - 1)
        self._spread = max(0.02, 0.9 * self._spread + 0.1 * error)
        return bounded_s

    def _solve(self) -> Coefficients:
        # In units of the scaled prior: minimise |X z - 1|^2 + strength * |z - 1|^2 with z >= (0, floor, 0).
        scale = float(self._prior @ self._moment) / float(self._prior @ self._normal @ self._prior)
        unit = scale * self._prior
        normal = self._normal * np.outer(unit, unit) + self.STRENGTH * np.eye(3)
        moment = self._moment * unit + self.STRENGTH
        floor = np.array([0.0, self.FLOOR, 0.0])
        root = np.linalg.cholesky(normal)
        above, _ = nnls(root.T, np.linalg.solve(root, moment - normal @ floor))
        base_s, per_request_s, per_union_s = (unit * (above + floor)).tolist()
        return Coefficients(base_s, per_request_s, per_union_s)


class StepTimes:
    """One model per group of like decoders."""

    def __init__(self) -> None:
        self._models: dict[str, StepTimeModel] = {}

    def model(self, group: str) -> StepTimeModel:
        """The model of a group, made at first sight."""
        if group not in self._models:
            self._models[group] = StepTimeModel()
        return self._models[group]
