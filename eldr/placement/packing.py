"""Replicas by weight, and packing of weighted slots on ranks of equal size, as DeepSeek's EPLB describes it."""

import numpy as np
import numpy.typing as npt

from eldr.placement.geometry import Geometry

FloatRow = npt.NDArray[np.float64]


def replicate(weights: FloatRow, geometry: Geometry) -> npt.NDArray[np.int64]:
    """Replicas of each expert, int64 [experts]: each redundant slot goes to the expert with the most weight a replica.

    weights: [experts]. Ties go to the expert with fewer replicas, then to the lower number; none has more replicas
    than there are ranks on its node.
    """
    count = np.ones(geometry.experts, dtype=np.int64)
    most = geometry.ranks // geometry.nodes
    for _ in range(geometry.redundant):
        share = np.where(count < most, weights / count, -1.0)
        best = np.flatnonzero(share == share.max())
        count[best[np.argmin(count[best])]] += 1
    return count


def pack(weights: FloatRow, count: npt.NDArray[np.int64], geometry: Geometry) -> npt.NDArray[np.int64]:
    """A layer's map [slots]: heaviest slot first, each on the rank with the least weight that has room for it.

    weights: [experts], shared equally by an expert's `count` replicas. Where every rank with room holds the expert
    already, another expert makes room.
    """
    per_replica = weights / count
    items = np.repeat(np.arange(geometry.experts), count)
    items = items[np.argsort(-per_replica[items], kind="stable")]
    ranks: list[list[int]] = [[] for _ in range(geometry.ranks)]
    weight = [0.0] * geometry.ranks
    room = geometry.slots_per_rank
    for item in map(int, items):
        free = [rank for rank in range(geometry.ranks) if len(ranks[rank]) < room]
        lacking = [rank for rank in free if item not in ranks[rank]]
        if lacking:
            target = min(lacking, key=weight.__getitem__)
        else:
            target = min(
                (rank for rank in range(geometry.ranks) if item not in ranks[rank]), key=weight.__getitem__
            )
            giver = next(held for held in reversed(ranks[target]) if held not in ranks[free[0]])
            ranks[target].remove(giver)
            ranks[free[0]].append(giver)
            weight[target] -= float(per_replica[giver])
            weight[free[0]] += float(per_replica[giver])
        ranks[target].append(item)
        weight[target] += float(per_replica[item])
    return np.array([sorted(held) for held in ranks], dtype=np.int64).ravel()


def spread(hits: FloatRow, geometry: Geometry) -> npt.NDArray[np.int64]:
    """A layer's map [slots] that lets a choice of replicas even out the ranks.

    Experts that are touched often get a second replica before any gets a third. Their replicas lie on ranks next to
    each other in a ring, then two apart and so on, so that load can flow from any rank to any other; two replicas
    between the same two ranks help less. The other experts follow by weight, as in `pack`.
    hits: [experts], share of steps that touch an expert.
    """
    count = np.ones(geometry.experts, dtype=np.int64)
    for _ in range(geometry.redundant):
        gain = np.where(count < geometry.ranks, (hits + 1e-9) / (count * (count + 1)), -1.0)
        count[np.argmax(gain)] += 1
    ranks: list[list[int]] = [[] for _ in range(geometry.ranks)]
    weight = [0.0] * geometry.ranks
    room = geometry.slots_per_rank
    by_hits = np.argsort(-hits, kind="stable")
    for number, expert in enumerate(map(int, by_hits[count[by_hits] > 1])):
        apart = 1 + number // geometry.ranks % max(1, geometry.ranks - 1)
        ring = [(number + nth * apart) % geometry.ranks for nth in range(geometry.ranks)]
        wanted = dict.fromkeys([*ring, *range(geometry.ranks)])
        with_room = [rank for rank in wanted if len(ranks[rank]) < room]
        if len(with_room) < count[expert]:
            # Nearly every expert has replicas: a ring no longer comes out even.
            return pack(hits, count, geometry)
        for rank in with_room[: count[expert]]:
            ranks[rank].append(expert)
            weight[rank] += float(hits[expert] / count[expert])
    for expert in map(int, by_hits[count[by_hits] == 1]):
        rank = min(
            (rank for rank in range(geometry.ranks) if len(ranks[rank]) < room), key=weight.__getitem__
        )
        ranks[rank].append(expert)
        weight[rank] += float(hits[expert])
    return np.array([sorted(held) for held in ranks], dtype=np.int64).ravel()
