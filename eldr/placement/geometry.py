"""The slots that a model's experts are placed on, and what makes a map of them valid."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.int64]
"""Physical to logical: the expert in each slot, int64 [layers, slots], the slots of rank 0 first."""


class PlacementError(ValueError):
    """A geometry, a demand or a map that cannot be; the message names what and the allowed range."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Every layer has `slots` physical slots, equally many on each of `ranks` ranks, which share `nodes` equally.

    slots: experts + redundant experts. No rank holds an expert twice; on several nodes, an equal share of the
        experts lives on each node and all replicas of an expert on the same one, so that neither rearranging
        nor choosing a replica moves anything between nodes.
    Raises PlacementError, with the nearest count of redundant experts that is valid.
    """

    experts: int
    ranks: int
    slots: int
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("experts", "ranks", "slots", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise PlacementError(f"{name} must be a whole number of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        for name in ("ranks", "experts"):
            if getattr(self, name) % self.nodes:
                raise PlacementError(
                    f"{self.nodes} nodes must share {name} equally, {getattr(self, name)} {name} do not divide"
                )
        if self.slots not in self._valid(self.slots):
            nearest = min(self._valid(self.slots), key=lambda slots: (abs(slots - self.slots), -slots))
            raise PlacementError(
                f"{self.slots} slots for {self.experts} experts on {self.ranks} ranks: slots must divide by the "
                f"ranks, hold every expert, and be at most {self._most} so that no rank holds an expert twice; "
                f"the nearest valid number is {nearest} ({nearest - self.experts} redundant experts)"
            )

    @property
    def _most(self) -> int:
        return self.ranks * (self.experts // self.nodes)

    def _valid(self, slots: int) -> list[int]:
        """Valid numbers of slots next to the given one."""
        least = -(-self.experts // self.ranks) * self.ranks
        below = slots // self.ranks * self.ranks
        return [min(max(count, least), self._most) for count in (below, below + self.ranks)]

    @classmethod
    def with_redundancy(cls, experts: int, ranks: int, share: float, nodes: int = 1) -> "Geometry":
        """With the least number of redundant experts that divides and is at least `share` of the experts."""
        wanted = experts + int(np.ceil(share * experts))
        return cls(experts, ranks, -(-wanted // ranks) * ranks, nodes)

    @property
    def redundant(self) -> int:
        """Slots beyond one for each expert."""
        return self.slots - self.experts

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank."""
        return self.slots // self.ranks

    @property
    def rank_of_slot(self) -> npt.NDArray[np.int64]:
        """int64 [slots]."""
        return np.arange(self.slots) // self.slots_per_rank

    def check_map(self, slots: npt.ArrayLike, layers: Sequence[int] | int, name: str = "map") -> Map:
        """A map that obeys every rule, as int64 [layers, slots].

        layers: their indices, or how many there are, numbered from 0.
        Raises PlacementError that lists the layers with another number of slots, with experts missing or unknown,
        with an expert twice on a rank or on two nodes; and for another number of layers.
        """
        indices = list(range(layers)) if isinstance(layers, int) else list(layers)
        rows = [np.asarray(row) for row in slots]  # type: ignore[union-attr]
        if len(rows) != len(indices):
            raise PlacementError(f"{name} has {len(rows)} layers, the model has {len(indices)}: {indices}")
        self._refuse(
            [index for index, row in zip(indices, rows, strict=True) if row.shape != (self.slots,)],
            f"{name}: every layer must have {self.slots} slots",
        )
        table = np.array(rows).reshape(len(rows), self.slots)
        if table.dtype.kind not in "ui":
            raise PlacementError(f"{name} must hold whole numbers, got {table.dtype}")
        table = table.astype(np.int64)
        known = np.asarray(((table >= 0) & (table < self.experts)).all(axis=1))
        self._refuse(
            [index for index, ok in zip(indices, known, strict=True) if not ok],
            f"{name}: experts must be 0 to {self.experts - 1}",
        )
        held = self.holds(table)
        on_nodes = np.asarray(held.reshape(len(table), self.nodes, -1, self.experts).any(axis=2).sum(axis=1))
        checks = (
            (
                np.asarray(held.any(axis=1)).all(axis=1),
                f"{name}: every one of {self.experts} experts needs a slot",
            ),
            (held.sum(axis=(1, 2)) == self.slots, f"{name}: no rank may hold an expert twice"),
            (
                (on_nodes <= 1).all(axis=1),
                f"{name}: all replicas of an expert belong on one of {self.nodes} nodes",
            ),
        )
        for passed, what in checks:
            self._refuse(
                [index for index, ok in zip(indices, np.asarray(passed), strict=True) if not ok], what
            )
        return table

    def holds(self, slots: Map) -> npt.NDArray[np.bool_]:
        """Which rank holds which expert, bool [layers, ranks, experts]."""
        held = np.zeros((len(slots), self.ranks, self.experts), dtype=bool)
        np.put_along_axis(held, slots.reshape(len(slots), self.ranks, -1), True, axis=2)
        return held

    def _refuse(self, layers: list[int], what: str) -> None:
        if layers:
            raise PlacementError(f"{what}; layers {layers} break this")
