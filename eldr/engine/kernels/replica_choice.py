"""Physical slots of a step's picks, with one replica for each activated expert; see `eldr.placement.choice`.

On the host the set of activated experts is one integer of as many bits, so that counting a rank's experts is a mask and
a population count. On a device it is one Triton kernel. Both give what the reference gives.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from eldr.placement import Geometry, Replicas


class ReplicaChoice(Protocol):
    """`fewest-activated` for one layer."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Slots, of the same shape and type, of logical picks [tokens, top_k]; -1 for a pick that is no expert."""
        ...


def choice_for(device_type: str, layer_map: npt.NDArray[np.int64], geometry: Geometry) -> ReplicaChoice:
    """The implementation for a device, for a checked map [slots]."""
    replicas = Replicas.of(layer_map, geometry.experts)
    if device_type == "cpu":
        return HostChoice(replicas, geometry)
    from eldr.engine.kernels.replica_choice_triton import DeviceChoice

    return DeviceChoice(replicas, geometry, torch.device(device_type))


@dataclass(frozen=True, slots=True)
class _Chooser:
    """An expert with several replicas: its bit, and its replicas' slots and ranks."""

    bit: int
    expert: int
    slots: tuple[int, ...]
    ranks: tuple[int, ...]


class HostChoice:
    """The choice on bit masks. Nothing is allocated but the answer."""

    def __init__(self, replicas: Replicas, geometry: Geometry) -> None:
        rank_of_slot = geometry.rank_of_slot
        self._experts = geometry.experts
        self._bytes = -(-geometry.experts // 8)
        self._activated = np.zeros(self._bytes * 8, dtype=np.uint8)
        first = replicas.slots[:, 0]
        single = replicas.count == 1
        self._masks = [
            sum(1 << int(expert) for expert in np.flatnonzero(single & (rank_of_slot[first] == rank)))
            for rank in range(geometry.ranks)
        ]
        self._choosers = []
        for expert in map(int, replicas.order):
            slots = tuple(map(int, replicas.slots[expert, : replicas.count[expert]]))
            ranks = tuple(int(rank_of_slot[slot]) for slot in slots)
            self._choosers.append(_Chooser(1 << expert, expert, slots, ranks))
        # One place past the experts, for picks that are none.
        self._slot_of = np.concatenate([first, [-1]])

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        picks = ids.numpy()
        flat = picks.ravel()
        activated = self._activated
        activated[:] = 0
        try:
            activated[flat] = 1
            clean = flat.min(initial=0) >= 0 and not activated[self._experts :].any()
        except IndexError:
            clean = False
        if not clean:
            flat = np.where((flat >= 0) & (flat < self._experts), flat, self._experts)
            activated[:] = 0
            activated[flat[flat < self._experts]] = 1
        mask = int.from_bytes(np.packbits(activated, bitorder="little").tobytes(), "little")
        self._choose(mask)
        return torch.from_numpy(self._slot_of[flat].astype(picks.dtype).reshape(picks.shape))

    def _choose(self, mask: int) -> None:
        on_rank = [(mask & held).bit_count() for held in self._masks]
        slot_of = self._slot_of
        chosen: list[tuple[_Chooser, int]] = []
        for chooser in self._choosers:
            if mask & chooser.bit:
                best, fewest = 0, on_rank[chooser.ranks[0]]
                for nth, rank in enumerate(chooser.ranks):
                    if on_rank[rank] < fewest:
                        best, fewest = nth, on_rank[rank]
                on_rank[chooser.ranks[best]] = fewest + 1
                chosen.append((chooser, best))
        for chooser, own in chosen:
            best, fewest = own, on_rank[chooser.ranks[own]] - 1
            for nth, rank in enumerate(chooser.ranks):
                if on_rank[rank] < fewest:
                    best, fewest = nth, on_rank[rank]
            if best != own:
                on_rank[chooser.ranks[own]] -= 1
                on_rank[chooser.ranks[best]] += 1
            slot_of[chooser.expert] = chooser.slots[best]


def tables(replicas: Replicas, geometry: Geometry) -> dict[str, Any]:
    """The map as arrays for the kernel.

    first: int32 [experts], the slot of each expert's first replica. rank: int32 [experts], the rank of experts with
    one replica, -1 of others. order: int32 [choosers]. slot_on: int32 [choosers, ranks], -1 where there is none.
    """
    rank_of_slot = geometry.rank_of_slot
    slot_on = np.full((len(replicas.order), geometry.ranks), -1, dtype=np.int32)
    for row, expert in enumerate(replicas.order):
        slots = replicas.slots[expert, : replicas.count[expert]]
        slot_on[row, rank_of_slot[slots]] = slots
    first = replicas.slots[:, 0]
    rank = np.where(replicas.count == 1, rank_of_slot[first], -1)
    return {
        "first": first.astype(np.int32),
        "rank": rank.astype(np.int32),
        "order": replicas.order.astype(np.int32),
        "slot_on": slot_on,
    }
