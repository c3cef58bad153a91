"""The fitted artifact: how to turn a signature into a vector, and one centroid per cluster."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from eldr.calibration.artifact import MAX_ARTIFACT_BYTES, Artifact, ArtifactError, pack, unpack
from eldr.calibration.atomic_file import write_atomically
from eldr.calibration.fit_record import ClusterRecord, Provenance, TransformQuality
from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import ModelGeometry
from eldr.signature.transform import Transform, TransformError, transform_named

Float32Array = npt.NDArray[np.float32]
Record = TypeVar("Record", TransformQuality, ClusterRecord, Provenance)

_UNIT_TOLERANCE = 1e-3


class ProfileError(ValueError):
    """A profile that cannot be read or whose fields contradict each other."""


class ProfileMismatchError(ProfileError, SignatureError):
    """A signature or a fleet of another model than the profile's: `field` differs, with both values."""

    def __init__(self, field: str, profile: object, other: object, other_name: str = "the signature") -> None:
        super().__init__(f"{field} differs: the profile has {profile!r}, {other_name} has {other!r}")
        self.field = field
        self.profile = profile
        self.other = other


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A fit, ready for routing; arrays are read-only.

    `idf` float32 [layers, experts] are the transform's weights (ones where it learns none), `layer_mask` the
    positions, not model indices, of the MoE layers that count, and `centroids` float32 [clusters, dimensions],
    unit rows over the kept layers, flattened. `quality` has one entry per transform that was tried.
    `fingerprint` is "" where the counts came without one; then no live signature fits the profile.
    Raises ProfileError where a field is out of range.
    """

    fingerprint: str
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    transform: str
    idf: Float32Array
    layer_mask: tuple[int, ...]
    centroids: Float32Array
    quality: tuple[TransformQuality, ...]
    clustering: ClusterRecord
    provenance: Provenance
    warnings: tuple[str, ...] = ()
    _transform: Transform = field(init=False, repr=False)
    _weights: Float32Array = field(init=False, repr=False)
    _kept: slice | npt.NDArray[np.intp] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check()
        for name in ("idf", "centroids"):
            array = np.array(getattr(self, name), dtype=np.float32, order="C")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        layers = len(self.moe_layers)
        cells = np.arange(layers * self.experts).reshape(layers, self.experts)[list(self.layer_mask)].ravel()
        everything = len(self.layer_mask) == layers
        object.__setattr__(self, "_transform", transform_named(self.transform))
        object.__setattr__(self, "_weights", self.idf.ravel()[cells])
        object.__setattr__(self, "_kept", slice(None) if everything else cells)

    @property
    def clusters(self) -> int:
        """Number of centroids."""
        return len(self.centroids)

    @property
    def shape(self) -> tuple[int, int]:
        """[layers, experts] of the signatures that the profile takes."""
        return len(self.moe_layers), self.experts

    def require_geometry(self, geometry: ModelGeometry) -> None:
        """Raises ProfileMismatchError naming the first field in which the fleet's model differs."""
        for name in ("fingerprint", "moe_layers", "experts", "top_k"):
            mine, theirs = getattr(self, name), getattr(geometry, name)
            if mine != theirs:
                raise ProfileMismatchError(name, mine, theirs, "the fleet")

    def vector(self, signature: ExpertSignature) -> Float32Array | None:
        """Unit vector [dimensions], or None where the weighted counts have no usable norm (case 3.20).

        Raises ProfileMismatchError for a signature of another model. Coverage is not looked at.
        """
        weighted = self._weighted(signature)
        norm = _norm(weighted)
        return None if norm is None else weighted / norm

    def similarities(self, signature: ExpertSignature) -> Float32Array | None:
        """Cosine with each centroid, float32 [clusters], never NaN; None and errors as in `vector`."""
        weighted = self._weighted(signature)
        norm = _norm(weighted)
        if norm is None:
            return None
        cosines: Float32Array = self.centroids @ weighted
        cosines /= norm
        return cosines

    def to_bytes(self) -> bytes:
        """The file's content; equal profiles give equal bytes. Raises ProfileError where it would be too large."""
        header = {
            "fingerprint": self.fingerprint,
            "moe_layers": self.moe_layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "transform": self.transform,
            "layer_mask": self.layer_mask,
            "quality": [dataclasses.asdict(quality) for quality in self.quality],
            "clustering": dataclasses.asdict(self.clustering),
            "provenance": dataclasses.asdict(self.provenance),
            "warnings": self.warnings,
        }
        try:
            return pack(Artifact(header, {"idf": self.idf, "centroids": self.centroids}))
        except ArtifactError as error:
            raise ProfileError(str(error)) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> "Profile":
        """Inverse of `to_bytes`; raises ProfileError that says what is wrong with the bytes."""
        try:
            artifact = unpack(data)
        except ArtifactError as error:
            raise ProfileError(str(error)) from error
        header, arrays = artifact.header, artifact.arrays
        try:
            return cls(
                fingerprint=str(header["fingerprint"]),
                moe_layers=tuple(int(layer) for layer in header["moe_layers"]),
                experts=int(header["experts"]),
                top_k=int(header["top_k"]),
                transform=str(header["transform"]),
                idf=arrays["idf"],
                layer_mask=tuple(int(layer) for layer in header["layer_mask"]),
                centroids=arrays["centroids"],
                quality=tuple(_record(TransformQuality, fields) for fields in header["quality"]),
                clustering=_record(ClusterRecord, header["clustering"]),
                provenance=_record(Provenance, header["provenance"]),
                warnings=tuple(str(warning) for warning in header["warnings"]),
            )
        except KeyError as error:
            raise ProfileError(f"header or arrays lack {error}") from error
        except ProfileError:
            raise
        except (TypeError, ValueError) as error:
            raise ProfileError(f"header is malformed: {error}") from error

    def save(self, path: Path) -> None:
        """Writes the file in one step. Raises ProfileError, OSError."""
        data = self.to_bytes()
        write_atomically(path, lambda file: file.write(data))

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Reads a file of at most MAX_ARTIFACT_BYTES. Raises ProfileError that names the file, OSError."""
        with open(path, "rb") as file:
            data = file.read(MAX_ARTIFACT_BYTES + 1)
        try:
            return cls.from_bytes(data)
        except ProfileError as error:
            raise ProfileError(f"{os.fspath(path)}: {error}") from error

    def _weighted(self, signature: ExpertSignature) -> Float32Array:
        if signature.fingerprint != self.fingerprint:
            raise ProfileMismatchError("fingerprint", self.fingerprint, signature.fingerprint)
        if signature.counts.shape != self.shape:
            raise ProfileMismatchError("[layers, experts]", self.shape, signature.shape)
        if signature.top_k != self.top_k:
            raise ProfileMismatchError("top_k", self.top_k, signature.top_k)
        counts = signature.counts.reshape(-1)[self._kept].astype(np.float32)
        return self._transform.element(counts) * self._weights

    def _check(self) -> None:
        layers = len(self.moe_layers)
        if not self.moe_layers or list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise ProfileError(f"moe_layers must be ascending and not empty, got {self.moe_layers}")
        if not 1 <= self.top_k <= self.experts:
            raise ProfileError(f"top_k must be 1 to experts, {self.experts}, got {self.top_k}")
        mask = self.layer_mask
        if not mask or list(mask) != sorted(set(mask)) or mask[0] < 0 or mask[-1] >= layers:
            raise ProfileError(f"layer_mask must be ascending positions 0 to {layers - 1}, got {mask}")
        try:
            transform_named(self.transform)
        except TransformError as error:
            raise ProfileError(str(error)) from error
        if self.idf.shape != (layers, self.experts):
            raise ProfileError(f"idf must be {(layers, self.experts)}, got {self.idf.shape}")
        if not np.isfinite(self.idf).all() or self.idf.min() < 0:
            raise ProfileError("idf must be finite and not negative")
        dimensions = len(mask) * self.experts
        if self.centroids.ndim != 2 or self.centroids.shape[1] != dimensions or not len(self.centroids):
            raise ProfileError(f"centroids must be [clusters, {dimensions}], got {self.centroids.shape}")
        norms = np.sqrt(np.einsum("kd,kd->k", self.centroids, self.centroids, dtype=np.float64))
        bad = np.flatnonzero(~(np.abs(norms - 1.0) <= _UNIT_TOLERANCE))
        if bad.size:
            raise ProfileError(f"centroid {bad[0]} must have norm 1, got {norms[bad[0]]:.4g}")
        for quality in self.quality:
            if len(quality.order) != len(quality.curve) or not 1 <= len(quality.mask) <= layers:
                raise ProfileError(
                    f"quality of {quality.transform}: mask, order and curve contradict each other"
                )
            if quality.curve and len(quality.curve) < len(quality.mask):
                raise ProfileError(f"quality of {quality.transform}: the curve ends before its mask")
        if len(self.clustering.sizes) != len(self.centroids):
            raise ProfileError(
                f"cluster sizes must be {len(self.centroids)}, got {len(self.clustering.sizes)}"
            )


def _norm(weighted: Float32Array) -> np.float32 | None:
    norm: np.float32 = np.sqrt(weighted @ weighted)
    return norm if 0.0 < norm < np.inf else None


def _record(kind: Callable[..., Record], fields: Mapping[str, Any]) -> Record:
    """A record from its JSON object; raises TypeError for missing, unknown and mistyped fields."""
    record = kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in dict(fields).items()})
    for name, hint in get_type_hints(type(record)).items():
        value, item = getattr(record, name), get_args(hint)
        if item and not isinstance(value, tuple):
            raise TypeError(f"{name} must be a list")
        allowed = (int, float) if (item[0] if item else hint) is float else (item[0] if item else hint,)
        if any(type(part) not in allowed for part in (value if item else (value,))):
            raise TypeError(f"{name} must be {allowed[-1].__name__}{'s' if item else ''}")
    return record
