"""Expert signatures: what a prompt selected, and what vectors and qualities follow from it. Pure."""

from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import GeometryError, ModelGeometry

__all__ = ["ExpertSignature", "GeometryError", "ModelGeometry", "SignatureError"]
