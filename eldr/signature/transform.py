"""Transforms: from expert counts [requests, layers, experts] to the unit vectors that are compared.

A weighted count is `element(c) * w[layer, expert]`: `element` is fixed, `w` is learned once from the
calibration counts and kept in the profile. A signature is the weighted counts of the kept layers, flattened
and divided by their L2 norm (paper section 3).

TRANSFORMS read counts, which live signatures carry. GATE_TRANSFORMS read sums over the prompt's tokens of what the
gate gave every expert; only a calibration that was asked for them has those, so they are there to be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

CountArray = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

COUNTS = "counts"
"""What transforms of a live signature read."""


class TransformError(ValueError):
    """Unknown transform, or arrays whose shapes do not fit."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One way to weigh an array; `element` works on float arrays [..., experts] and keeps shape and dtype.

    `reads` names the array: "counts", or "gate_probability" or "gate_logit" of a counts file.
    """

    name: str
    formula: str
    source: str
    element: Callable[[Float32Array], Float32Array]
    weight: Callable[[Float64Array, int], Float64Array]
    reads: str = COUNTS

    @property
    def live(self) -> bool:
        """Whether a router can compute it: live signatures carry counts only."""
        return self.reads == COUNTS

    def learn(self, counts: CountArray) -> Float64Array:
        """Weights [layers, experts] from calibration counts [requests, layers, experts].

        They depend only on N and on df, the number of requests in which the expert's count is above zero.
        Raises TransformError where counts have another number of dimensions or no request.
        """
        if counts.ndim != 3 or counts.shape[0] == 0:
            raise TransformError(f"counts must be [requests, layers, experts], got shape {counts.shape}")
        document_frequency = np.count_nonzero(counts > 0, axis=0).astype(np.float64)
        return self.weight(document_frequency, counts.shape[0])

    def weigh(self, counts: CountArray, weights: npt.NDArray[np.floating[Any]]) -> Float32Array:
        """Weighted counts, float32 [..., layers, experts], for counts of the same shape.

        Raises TransformError where the last two dimensions are not those of `weights`.
        """
        if counts.shape[-2:] != weights.shape:
            raise TransformError(f"counts are {counts.shape[-2:]}, weights {weights.shape} [layers, experts]")
        weighted = self.element(np.asarray(counts, dtype=np.float32))
        return weighted * weights.astype(np.float32)


def _identity(counts: Float32Array) -> Float32Array:
    return counts


def _root(counts: Float32Array) -> Float32Array:
    return np.sqrt(counts)


def _presence(counts: Float32Array) -> Float32Array:
    return (counts > 0).astype(np.float32)


def _centred(logits: Float32Array) -> Float32Array:
    centred: Float32Array = logits - logits.mean(axis=-1, keepdims=True)
    return centred


def _ones(document_frequency: Float64Array, _requests: int) -> Float64Array:
    return np.ones_like(document_frequency)


def _idf(document_frequency: Float64Array, requests: int) -> Float64Array:
    return np.log((requests + 1.0) / (document_frequency + 1.0))


def _smoothed_idf(document_frequency: Float64Array, requests: int) -> Float64Array:
    return 1.0 + _idf(document_frequency, requests)


def _by_name(*transforms: Transform) -> Mapping[str, Transform]:
    return MappingProxyType({transform.name: transform for transform in transforms})


TRANSFORMS: Mapping[str, Transform] = _by_name(
    Transform("count-idf", "c * ln((N + 1) / (df + 1))", "ELDR, section 3", _identity, _idf),
    Transform(
        "count-smoothed-idf",
        "c * (1 + ln((N + 1) / (df + 1)))",
        "smoothed idf as in scikit-learn's TfidfTransformer(smooth_idf=True); at least 1",
        _identity,
        _smoothed_idf,
    ),
    Transform("count", "c", "ELDR, signature ablation", _identity, _ones),
    Transform("sqrt", "sqrt(c)", "ELDR, signature ablation", _root, _ones),
    Transform("binary", "1 if c > 0 else 0", "ELDR, signature ablation", _presence, _ones),
)
"""Transforms of counts by name, the published one first. c: prompt tokens that selected the expert in the layer;
N: calibration requests; df: those of them with c > 0.

- count-idf, c * ln((N + 1) / (df + 1)): the published signature. 0 for an expert that every request uses.
- count-smoothed-idf, c * (1 + ln((N + 1) / (df + 1))): every expert keeps at least its count.
- count, c. sqrt, sqrt(c): cosines of square roots are Bhattacharyya coefficients per layer, up to layer weights.
- binary, 1 if c > 0: long prompts touch every expert, so it says little.
"""

GATE_TRANSFORMS: Mapping[str, Transform] = _by_name(
    Transform(
        "gate-probability", "sum of p", "ELDR, signature ablation", _identity, _ones, "gate_probability"
    ),
    Transform("gate-logit", "sum of z", "ELDR, signature ablation", _identity, _ones, "gate_logit"),
    Transform(
        "gate-logit-centred",
        "sum of z - mean over experts of (sum of z)",
        "gate-logit without what a softmax ignores",
        _centred,
        _ones,
        "gate_logit",
    ),
)
"""Transforms of gate sums by name. p and z: what the gate gave the expert for a token, after and before its scoring
function; sums over the prompt's tokens.

- gate-probability, sum of p: a soft count, not negative.
- gate-logit, sum of z: may be negative, so a cosine lies in [-1, 1] and a distance in [0, 2]. A softmax gate does not
  change when one number is added to all logits of a token, but this cosine does: a common offset of a layer pulls all
  requests together, whatever experts they prefer.
- gate-logit-centred, sum of z minus its mean over the layer's experts: free of that offset, so the cosine is the
  correlation of two requests' preferences (over one layer exactly Pearson's). An expert that both avoid brings two
  requests together as much as one that both prefer.
"""


def transform_named(name: str) -> Transform:
    """The transform of counts of that name.

    Raises TransformError that lists the known ones, or says why a gate transform cannot stand in a profile.
    """
    if name in GATE_TRANSFORMS:
        raise TransformError(
            f"transform {name} reads {GATE_TRANSFORMS[name].reads}, but live signatures carry counts only: "
            f"no router could compute it; take one of {', '.join(TRANSFORMS)}"
        )
    if name not in TRANSFORMS:
        raise TransformError(f"transform must be one of {', '.join(TRANSFORMS)}, got {name!r}")
    return TRANSFORMS[name]


@dataclass(frozen=True, slots=True, eq=False)
class UnitRows:
    """Unit vectors, float32 [requests, dimensions], and which requests gave none.

    Rows listed in `zero` (nothing selected, or only experts of weight 0) and in `non_finite` are all zero in
    `rows`; they must not be compared with anything (case 3.20).
    """

    rows: Float32Array
    zero: tuple[int, ...]
    non_finite: tuple[int, ...]

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """bool [requests], true where the row has norm 1."""
        usable = np.ones(len(self.rows), dtype=np.bool_)
        usable[[*self.zero, *self.non_finite]] = False
        return usable


def unit_rows(weighted: Float32Array, layers: Sequence[int]) -> UnitRows:
    """Keeps `layers` of weighted counts [requests, layers, experts], flattens, and divides by the L2 norm.

    Raises TransformError where `layers` is empty or names a layer that does not exist.
    """
    if weighted.ndim != 3:
        raise TransformError(f"counts must be [requests, layers, experts], got shape {weighted.shape}")
    if not layers or min(layers) < 0 or max(layers) >= weighted.shape[1]:
        raise TransformError(f"layers must be some of 0 to {weighted.shape[1] - 1}, got {tuple(layers)}")
    kept = np.ascontiguousarray(weighted[:, list(layers)]).reshape(len(weighted), -1)
    finite = np.isfinite(kept).all(axis=1)
    norms = np.sqrt(np.einsum("nd,nd->n", kept, kept, dtype=np.float64))
    positive = norms > 0
    rows = np.zeros_like(kept)
    np.divide(kept, norms[:, None], out=rows, where=(finite & positive)[:, None], casting="same_kind")
    return UnitRows(
        rows,
        zero=tuple(np.flatnonzero(finite & ~positive).tolist()),
        non_finite=tuple(np.flatnonzero(~finite).tolist()),
    )
