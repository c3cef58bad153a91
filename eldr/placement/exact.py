"""Every map of a small layer, up to the names of the ranks."""

from itertools import combinations, combinations_with_replacement
from math import comb

import numpy as np
import numpy.typing as npt

from eldr.placement.geometry import Geometry, Map
from eldr.placement.replay import use_fewest_activated


def candidates(geometry: Geometry) -> int:
    """How many sets of ranks `all_maps` looks at."""
    return comb(comb(geometry.experts, geometry.slots_per_rank) + geometry.ranks - 1, geometry.ranks)


def all_maps(geometry: Geometry) -> Map:
    """All valid maps on one node that differ in more than the order of ranks and of slots, [maps, slots]."""
    contents = list(combinations(range(geometry.experts), geometry.slots_per_rank))
    bits = [sum(1 << expert for expert in held) for held in contents]
    every = (1 << geometry.experts) - 1
    found = []
    for choice in combinations_with_replacement(range(len(contents)), geometry.ranks):
        covered = 0
        for index in choice:
            covered |= bits[index]
        if covered == every:
            found.append([expert for index in choice for expert in contents[index]])
    return np.array(found, dtype=np.int64)


def best_map(activated: npt.NDArray[np.bool_], maps: Map, geometry: Geometry) -> npt.NDArray[np.int64]:
    """The map [slots] with the least expected maximum over ranks; the first of equals.

    activated: bool [experts, steps], one layer.
    """
    repeated = np.broadcast_to(activated, (len(maps), *activated.shape))
    best: npt.NDArray[np.int64] = maps[np.argmin(use_fewest_activated(repeated, maps, geometry).largest)]
    return best
