"""Expert signatures: what a prompt selected, and what vectors and qualities follow from it. Pure."""

from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import GeometryError, ModelGeometry
from eldr.signature.transform import (
    GATE_TRANSFORMS,
    TRANSFORMS,
    Transform,
    TransformError,
    UnitRows,
    transform_named,
    unit_rows,
)

__all__ = [
    "GATE_TRANSFORMS",
    "TRANSFORMS",
    "ExpertSignature",
    "GeometryError",
    "ModelGeometry",
    "SignatureError",
    "Transform",
    "TransformError",
    "UnitRows",
    "transform_named",
    "unit_rows",
]
