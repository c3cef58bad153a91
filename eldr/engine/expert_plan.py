"""A placement of experts on physical slots, as it is pushed to a worker: versioned, whole, the same on all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class ExpertPlanError(ValueError):
    """A plan that does not fit the model; the message lists the layers."""


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """slots: MoE layer index -> logical expert in each of the layer's physical slots, slots of rank 0 first."""

    version: int
    slots: Mapping[int, Sequence[int]]

    def physical_to_logical(
        self, moe_layers: Sequence[int], experts: int, ranks: int
    ) -> npt.NDArray[np.int64]:
        """The plan as int64 [layers, slots], the layers in the order of `moe_layers`.

        Raises ExpertPlanError where layers are missing or unknown, where layers differ in their number of slots,
        where it does not divide by the ranks, and where a layer lacks an expert or names one that is none.
        """
        if set(self.slots) != set(moe_layers):
            missing, unknown = set(moe_layers) - set(self.slots), set(self.slots) - set(moe_layers)
            raise ExpertPlanError(
                f"plan {self.version} must cover MoE layers {list(moe_layers)}: "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        counts = {layer: len(self.slots[layer]) for layer in moe_layers}
        if len(set(counts.values())) > 1:
            raise ExpertPlanError(f"plan {self.version} has layers with unequal numbers of slots: {counts}")
        if counts[moe_layers[0]] % ranks:
            raise ExpertPlanError(
                f"plan {self.version} has {counts[moe_layers[0]]} slots a layer, not a multiple of {ranks} ranks"
            )
        wrong = [layer for layer in moe_layers if set(self.slots[layer]) != set(range(experts))]
        if wrong:
            raise ExpertPlanError(
                f"plan {self.version} must hold each of {experts} experts, and no others, in every layer; "
                f"layers {wrong} do not"
            )
        return np.array([self.slots[layer] for layer in moe_layers], dtype=np.int64)


def common_version(newest: Iterable[int]) -> int:
    """The version that every rank has, given the newest one of each: all ranks switch to it, or none does."""
    return min(newest)
