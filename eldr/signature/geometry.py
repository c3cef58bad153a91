"""The shape that a model's routing has, and the fingerprint that two workers must share."""

from dataclasses import dataclass


class GeometryError(ValueError):
    """Two sides disagree about the model, or a geometry makes no sense."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """MoE layers, experts and top-k of one model, with the identity of its weights.

    Raises GeometryError where a field is out of range.
    """

    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    fingerprint: str

    def __post_init__(self) -> None:
        if not self.moe_layers or list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise GeometryError(f"moe_layers must be ascending and not empty, got {self.moe_layers}")
        if self.moe_layers[0] < 0:
            raise GeometryError(f"moe_layers must not be negative, got {self.moe_layers[0]}")
        if self.experts < 1:
            raise GeometryError(f"experts must be at least 1, got {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise GeometryError(f"top_k must be 1 to {self.experts}, got {self.top_k}")
        if not self.fingerprint:
            raise GeometryError("fingerprint must not be empty")

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.moe_layers)

    @property
    def shape(self) -> tuple[int, int]:
        """[layers, experts]."""
        return len(self.moe_layers), self.experts

    def require_same(self, other: "ModelGeometry", mine: str, theirs: str) -> None:
        """Raises GeometryError naming the first field in which two geometries differ, with both values."""
        for field in ("fingerprint", "moe_layers", "experts", "top_k"):
            a, b = getattr(self, field), getattr(other, field)
            if a != b:
                raise GeometryError(f"{field} differs: {mine} has {a}, {theirs} has {b}")
