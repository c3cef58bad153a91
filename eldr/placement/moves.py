"""What it takes to get from one map to another, and the naming of ranks and slots that takes least."""

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from eldr.placement.geometry import Geometry, Map


def aligned(maps: Map, present: Map, geometry: Geometry) -> Map:
    """The same placement with ranks, nodes and slots named so that least has to move from `present`.

    Both [layers, slots]. Ranks of a node stay together; an expert that a rank keeps stays in its slot.
    """
    return np.stack([_aligned_layer(*pair, geometry) for pair in zip(maps, present, strict=True)])


def moved(maps: Map, present: Map, geometry: Geometry) -> npt.NDArray[np.int64]:
    """Experts that a rank has to fetch because it does not hold them in `present`, [layers]."""
    fetched = geometry.holds(maps) & ~geometry.holds(present)
    return np.asarray(fetched.sum(axis=(1, 2)))


def _aligned_layer(
    row: npt.NDArray[np.int64], present: npt.NDArray[np.int64], geometry: Geometry
) -> npt.NDArray[np.int64]:
    new, old = row.reshape(geometry.ranks, -1), present.reshape(geometry.ranks, -1)
    held_new, held_old = (geometry.holds(table[None])[0].astype(np.int64) for table in (row, present))
    kept = (held_new @ held_old.T).reshape(
        geometry.nodes, -1, geometry.nodes, geometry.ranks // geometry.nodes
    )
    kept = kept.transpose(0, 2, 1, 3)
    within = {}
    by_node = np.zeros((geometry.nodes, geometry.nodes), dtype=np.int64)
    for a in range(geometry.nodes):
        for b in range(geometry.nodes):
            source, target = linear_sum_assignment(kept[a, b], maximize=True)
            within[a, b] = source[np.argsort(target)]
            by_node[a, b] = kept[a, b][source, target].sum()
    source_node, target_node = linear_sum_assignment(by_node, maximize=True)
    result = np.empty_like(old)
    per_node = geometry.ranks // geometry.nodes
    for a, b in zip(map(int, source_node), map(int, target_node), strict=True):
        for position, source in enumerate(within[a, b]):
            rank = b * per_node + position
            result[rank] = _in_old_slots(new[a * per_node + source], old[rank])
    return result.ravel()


def _in_old_slots(new: npt.NDArray[np.int64], old: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    stays = np.isin(old, new)
    result = old.copy()
    result[~stays] = new[~np.isin(new, old)]
    return result
