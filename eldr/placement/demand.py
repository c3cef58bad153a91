"""What a placement is planned on: how often, and how often together, a decode step touches the experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.placement.geometry import PlacementError

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Measured on the decode steps of one decoder, or expected for it.

    hits: [layers, experts], share of the steps that touch an expert, 0 to 1.
    tokens: [layers, experts], tokens that picked an expert; what balancing tokens goes by. None: `hits` stand in.
    steps: bool [steps, layers, experts], which experts single steps touched.
    together: [layers, experts, experts], share of the steps that touch both; stands in where `steps` are not known.
        With neither, experts are taken to be independent of each other.
    observed_steps: how many steps stand behind the figures; None where it is not known.
    Raises PlacementError naming the field for wrong shapes, and the first layer and expert for values that are not
    finite or outside their range.
    """

    hits: Float64Array
    tokens: Float64Array | None = None
    steps: npt.NDArray[np.bool_] | None = None
    together: Float64Array | None = None
    observed_steps: float | None = None

    def __post_init__(self) -> None:
        hits = np.asarray(self.hits, dtype=np.float64)
        if hits.ndim != 2 or not hits.size:
            raise PlacementError(f"hits must be [layers, experts], got {hits.shape}")
        object.__setattr__(self, "hits", _checked("hits", hits, hits.shape, 1.0))
        if self.tokens is not None:
            tokens = np.asarray(self.tokens, dtype=np.float64)
            object.__setattr__(self, "tokens", _checked("tokens", tokens, hits.shape, np.inf))
        if self.together is not None:
            together = np.asarray(self.together, dtype=np.float64)
            shape = (*hits.shape, hits.shape[1])
            object.__setattr__(self, "together", _checked("together", together, shape, 1.0))
        if self.steps is not None:
            steps = np.asarray(self.steps)
            if steps.dtype != np.bool_ or steps.ndim != 3 or steps.shape[1:] != hits.shape or not len(steps):
                raise PlacementError(
                    f"steps must be bool [steps, {hits.shape[0]}, {hits.shape[1]}], got {steps.dtype} {steps.shape}"
                )
            object.__setattr__(self, "steps", steps)
        if self.observed_steps is not None and not self.observed_steps >= 0:
            raise PlacementError(f"observed_steps must be at least 0, got {self.observed_steps}")

    @classmethod
    def of_steps(cls, steps: npt.NDArray[np.bool_], tokens: npt.ArrayLike | None = None) -> "Demand":
        """From single steps, bool [steps, layers, experts]."""
        steps = np.asarray(steps)
        if steps.ndim != 3 or not len(steps):
            raise PlacementError(
                f"steps must be bool [steps, layers, experts], got {steps.dtype} {steps.shape}"
            )
        load = None if tokens is None else np.asarray(tokens, dtype=np.float64)
        return cls(steps.mean(axis=0), load, steps, observed_steps=float(len(steps)))

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return int(self.hits.shape[0])

    @property
    def experts(self) -> int:
        """Logical experts of a layer."""
        return int(self.hits.shape[1])

    @property
    def idle(self) -> npt.NDArray[np.bool_]:
        """Layers of which nothing is known, bool [layers]."""
        return np.asarray(~self.hits.any(axis=1))

    @property
    def load(self) -> Float64Array:
        """Tokens per expert [layers, experts], or the hits where tokens are not known."""
        return self.hits if self.tokens is None else self.tokens

    def sampled(self, count: int, seed: int) -> npt.NDArray[np.bool_]:
        """`count` steps, bool [layers, count, experts]: of the observed ones spread evenly, or drawn.

        Drawn ones have the given hits and, where `together` is known, about its correlations (a Gaussian copula:
        an expert is touched where its normal variable lies under the quantile of its hits). Equal arguments give
        equal steps.
        """
        if self.steps is not None:
            chosen = np.unique(np.linspace(0, len(self.steps) - 1, count).round().astype(np.int64))
            return np.ascontiguousarray(self.steps[chosen].transpose(1, 0, 2))
        rng = np.random.default_rng(seed)
        if self.together is None:
            # Stratified: of `count` steps an expert is touched in exactly its share, rounded.
            order = rng.random((self.layers, count, self.experts)).argsort(axis=1)
            return np.asarray((order + 0.5) / count < self.hits[:, None, :])
        normal = rng.standard_normal((self.layers, count, self.experts))
        correlated = normal @ _roots(self.together, self.hits)
        order = correlated.argsort(axis=1).argsort(axis=1)
        return np.asarray((order + 0.5) / count < self.hits[:, None, :])

    def of_layers(self, layers: npt.NDArray[np.int64]) -> "Demand":
        """The demand of some layers."""
        return self._each(lambda array, axis: np.take(array, layers, axis=axis))

    def of_experts(self, members: npt.NDArray[np.int64]) -> "Demand":
        """The demand of some experts, other ones in each layer: int64 [layers, members]."""
        return self._each(
            lambda array, axis: (
                np.take_along_axis(array, members[None] if axis else members, axis=axis + 1)
                if array.ndim == 2 + axis
                else np.take_along_axis(
                    np.take_along_axis(array, members[:, :, None], axis=1), members[:, None, :], axis=2
                )
            )
        )

    def _each(self, take: Callable[[npt.NDArray[Any], int], npt.NDArray[Any]]) -> "Demand":
        """Every array with the axis of its layers."""
        return Demand(
            take(self.hits, 0),
            None if self.tokens is None else take(self.tokens, 0),
            None if self.steps is None else take(self.steps, 1),
            None if self.together is None else take(self.together, 0),
            self.observed_steps,
        )


def _checked(name: str, values: Float64Array, shape: tuple[int, ...], most: float) -> Float64Array:
    if values.shape != shape:
        raise PlacementError(f"{name} must be {list(shape)}, got {list(values.shape)}")
    bad = ~np.isfinite(values) | (values < 0) | (values > most + 1e-9)
    if bad.any():
        layer, expert = np.argwhere(bad)[0][:2]
        value = values[bad][0]
        allowed = "finite and at least 0" if most == np.inf else f"0 to {most:g}"
        raise PlacementError(f"{name} must be {allowed}: layer {layer}, expert {expert} has {value}")
    return values


def _roots(together: Float64Array, hits: Float64Array) -> Float64Array:
    """Matrices that give independent normal variables about the correlations of the steps,
    [layers, experts, experts]."""
    spread = np.sqrt(np.maximum(hits * (1 - hits), 1e-12))
    covariance = together - hits[:, :, None] * hits[:, None, :]
    correlation = covariance / (spread[:, :, None] * spread[:, None, :])
    # The variables behind two binary ones correlate by sin(pi/2 phi), where both are touched in half of the steps.
    correlation = np.sin(np.clip(correlation, -1, 1) * (np.pi / 2))
    correlation = (correlation + correlation.transpose(0, 2, 1)) / 2
    diagonal = np.arange(hits.shape[1])
    correlation[:, diagonal, diagonal] = 1.0
    values, vectors = np.linalg.eigh(correlation)
    roots: Float64Array = (vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]).transpose(0, 2, 1)
    return roots
