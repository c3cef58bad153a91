"""Which replica of an activated expert a step uses: the reference for one step, and for many steps at once.

`hash`: every token picks a replica by its place in the batch, as vLLM's EPLB does, so that a step may read several
replicas of one expert. `fewest-activated`: each activated expert uses one replica in a step, chosen so that the rank
with the most activated experts has as few as possible (the objective of METRO, arXiv 2512.09277):

1. Experts with one replica count on their ranks.
2. The others, those with fewer replicas first and then by number, go to the rank with the fewest so far; ties to the
   lowest slot.
3. Once more in the same order, each looks whether another of its ranks has at least two fewer than its own, and moves.

The choice depends on nothing but the map and the set of activated experts, so ranks that see the same ids choose the
same replicas without a word between them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.placement.geometry import Geometry

HASH_MULTIPLIER = 2654435769
"""2^32 / golden ratio (Knuth), as in vLLM."""

REPLICA_CHOICES = ("hash", "fewest-activated")


@dataclass(frozen=True, slots=True, eq=False)
class Replicas:
    """One layer's map, seen from the experts.

    slots: int64 [experts, most replicas], physical slots in ascending order, -1 past the last.
    count: int64 [experts].
    order: experts with several replicas, in the order in which they choose.
    """

    slots: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layer_map: npt.NDArray[np.int64], experts: int) -> "Replicas":
        """Of a checked map [slots]."""
        count = np.bincount(layer_map, minlength=experts)
        by_expert = np.argsort(layer_map, kind="stable")
        nth = np.arange(layer_map.size) - np.repeat(np.cumsum(count) - count, count)
        slots = np.full((experts, int(count.max())), -1, dtype=np.int64)
        slots[layer_map[by_expert], nth] = by_expert
        several = np.flatnonzero(count > 1)
        return cls(slots, count, several[np.argsort(count[several], kind="stable")])


def choose_by_hash(ids: npt.NDArray[np.int64], replicas: Replicas) -> npt.NDArray[np.int64]:
    """Physical slots of picks [tokens, top_k]; a pick outside the experts (padding) gives -1."""
    known = (ids >= 0) & (ids < len(replicas.count))
    expert = np.where(known, ids, 0)
    hashed = (np.arange(len(ids), dtype=np.uint64) * np.uint64(HASH_MULTIPLIER) & np.uint64(0xFFFFFFFF))[
        :, None
    ]
    nth = (hashed % replicas.count[expert].astype(np.uint64)).astype(np.int64)
    return np.where(known, replicas.slots[expert, nth], -1)


def choose_fewest_activated(
    ids: npt.NDArray[np.int64], replicas: Replicas, geometry: Geometry
) -> npt.NDArray[np.int64]:
    """Physical slots of picks [tokens, top_k]; a pick outside the experts (padding) gives -1 and counts nowhere."""
    known = (ids >= 0) & (ids < geometry.experts)
    activated = np.zeros(geometry.experts, dtype=bool)
    activated[ids[known]] = True
    rank_of_slot = geometry.rank_of_slot
    chosen = replicas.slots[:, 0].copy()
    on_rank = [0] * geometry.ranks
    for expert in map(int, np.flatnonzero(activated & (replicas.count == 1))):
        on_rank[rank_of_slot[chosen[expert]]] += 1
    choosing = [int(expert) for expert in replicas.order if activated[expert]]
    for expert in choosing:
        chosen[expert] = min(_slots(replicas, expert), key=lambda slot: on_rank[rank_of_slot[slot]])
        on_rank[rank_of_slot[chosen[expert]]] += 1
    for expert in choosing:
        own = rank_of_slot[chosen[expert]]
        best = min(_slots(replicas, expert), key=lambda slot: on_rank[rank_of_slot[slot]])
        if on_rank[rank_of_slot[best]] < on_rank[own] - 1:
            on_rank[own] -= 1
            on_rank[rank_of_slot[best]] += 1
            chosen[expert] = best
    return np.where(known, chosen[np.where(known, ids, 0)], -1)


def _slots(replicas: Replicas, expert: int) -> list[int]:
    return [int(slot) for slot in replicas.slots[expert, : replicas.count[expert]]]
