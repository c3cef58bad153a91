"""Activated experts per rank under a map and a replica choice, for many steps at once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.placement.choice import HASH_MULTIPLIER, Replicas
from eldr.placement.geometry import Geometry, Map

Int16Array = npt.NDArray[np.int16]

_NO_RANK = np.int16(30_000)
"""What the missing replica of a padded row holds: more than any rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """used: bool [layers, slots, steps], the slots read. per_rank: int16 [layers, ranks, steps], how many."""

    used: npt.NDArray[np.bool_]
    per_rank: Int16Array

    @property
    def largest(self) -> npt.NDArray[np.float64]:
        """Mean over the steps of the largest number on a rank, [layers]."""
        return np.asarray(self.per_rank.max(axis=1).mean(axis=1, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Choosers:
    """Every layer's experts with several replicas in the order in which they choose, padded to equal lengths.

    single: bool [layers, slots], slots of experts with one replica.
    experts, real: [layers, choosers]; slots, ranks: [layers, choosers, most replicas], -1 and `geometry.ranks` where
        there is none.
    """

    single: npt.NDArray[np.bool_]
    experts: npt.NDArray[np.int64]
    real: npt.NDArray[np.bool_]
    slots: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]

    @classmethod
    def of(cls, maps: Map, geometry: Geometry) -> "Choosers":
        """Of checked maps [layers, slots]."""
        layers = np.arange(len(maps))[:, None]
        count = np.zeros((len(maps), geometry.experts), dtype=np.int64)
        np.add.at(count, (layers, maps), 1)
        choosing, most = int((count > 1).sum(axis=1).max()), int(count.max())
        by_expert = np.argsort(maps, axis=1, kind="stable")
        first = np.cumsum(count, axis=1) - count
        order = np.argsort(np.where(count > 1, count, geometry.slots + 1), axis=1, kind="stable")[
            :, :choosing
        ]
        replicas = count[layers, order]
        nth = np.arange(most)
        there = (nth < replicas[:, :, None]) & (replicas > 1)[:, :, None]
        place = np.minimum(first[layers, order][:, :, None] + nth, geometry.slots - 1)
        slots = np.where(there, by_expert[layers[:, :, None], place], -1)
        ranks = np.where(there, slots // geometry.slots_per_rank, geometry.ranks)
        return cls(count[layers, maps] == 1, order, replicas > 1, slots, ranks)


def use_fewest_activated(activated: npt.NDArray[np.bool_], maps: Map, geometry: Geometry) -> Use:
    """`choose_fewest_activated` for sets of activated experts, bool [layers, experts, steps]."""
    layers, _, steps = activated.shape
    table = Choosers.of(maps, geometry)
    used = np.take_along_axis(activated, maps[:, :, None], axis=1)
    used &= table.single[:, :, None]
    # The last rank stands for replicas that a padded row lacks.
    per_rank = np.full((layers, geometry.ranks + 1, steps), _NO_RANK)
    shape = (layers, geometry.ranks, geometry.slots_per_rank, steps)
    per_rank[:, :-1] = used.reshape(shape).sum(axis=2, dtype=np.int16)
    every, ranks = np.arange(layers), table.ranks
    choosing, most = ranks.shape[1:]
    chosen = np.zeros((choosing, layers, steps), dtype=np.int8)
    wants = []
    for expert in range(choosing):
        want = activated[every, table.experts[:, expert]] & table.real[:, expert, None]
        wants.append(want)
        nth, _ = _emptiest(per_rank, every, ranks[:, expert])
        chosen[expert] = nth
        for replica in range(most):
            per_rank[every, ranks[:, expert, replica]] += want & (nth == replica)
    for expert, want in enumerate(wants):
        nth, fewest = _emptiest(per_rank, every, ranks[:, expert])
        own = np.zeros_like(fewest)
        for replica in range(most):
            np.copyto(own, per_rank[every, ranks[:, expert, replica]], where=chosen[expert] == replica)
        moves = want & (fewest < own - 1)
        if moves.any():
            for replica in range(most):
                rank = ranks[:, expert, replica]
                per_rank[every, rank] -= moves & (chosen[expert] == replica)
                per_rank[every, rank] += moves & (nth == replica)
            np.copyto(chosen[expert], nth, where=moves)
        for replica in range(most):
            there = table.slots[:, expert, replica] >= 0
            slot = table.slots[there, expert, replica]
            used[every[there], slot] |= (want & (chosen[expert] == replica))[there]
    return Use(used, per_rank[:, :-1])


def _emptiest(
    per_rank: Int16Array, every: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int8], Int16Array]:
    """Which of an expert's replicas, on `ranks` [layers, replicas], has the emptiest rank in each step; the first
    among equals. And how many that rank has. Both [layers, steps]."""
    fewest = per_rank[every, ranks[:, 0]]
    nth = np.zeros(fewest.shape, dtype=np.int8)
    for replica in range(1, ranks.shape[1]):
        other = per_rank[every, ranks[:, replica]]
        less = other < fewest
        nth[less] = replica
        np.minimum(fewest, other, out=fewest)
    return nth, fewest


def use_by_hash(ids: npt.NDArray[np.integer], maps: Map, geometry: Geometry) -> Use:
    """`choose_by_hash` for picks [steps, tokens, layers, top_k], all of them experts."""
    steps, tokens, layers, _ = ids.shape
    used = np.zeros((layers, geometry.slots, steps), dtype=bool)
    hashed = np.arange(tokens, dtype=np.uint64) * np.uint64(HASH_MULTIPLIER) & np.uint64(0xFFFFFFFF)
    for layer, row in enumerate(maps):
        replicas = Replicas.of(row, geometry.experts)
        picks = ids[:, :, layer].astype(np.int64)
        nth = (hashed[None, :, None] % replicas.count[picks].astype(np.uint64)).astype(np.int64)
        used[layer, replicas.slots[picks, nth], np.arange(steps)[:, None, None]] = True
    shape = (layers, geometry.ranks, geometry.slots_per_rank, steps)
    return Use(used, used.reshape(shape).sum(axis=2, dtype=np.int16))


def activated_of(ids: npt.NDArray[np.integer], experts: int) -> npt.NDArray[np.bool_]:
    """Experts that each step touches, bool [layers, experts, steps], of picks [steps, tokens, layers, top_k]."""
    steps, _, layers, _ = ids.shape
    activated = np.zeros((layers, experts, steps), dtype=bool)
    step, layer = np.arange(steps)[:, None, None, None], np.arange(layers)[None, None, :, None]
    activated[layer, ids, step] = True
    return activated


def even_split(activated: npt.NDArray[np.bool_], ranks: int) -> npt.NDArray[np.float64]:
    """The least that any placement reaches: mean over steps of ceil(activated / ranks), [layers]."""
    return np.asarray(np.ceil(activated.sum(axis=1) / ranks).mean(axis=1))
