"""The planners: each makes a map per layer for one node, from a demand and a geometry."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from eldr.placement.demand import Demand, Float64Array
from eldr.placement.exact import all_maps, best_map, candidates
from eldr.placement.geometry import Geometry, Map
from eldr.placement.packing import pack, replicate, spread
from eldr.placement.replay import use_fewest_activated
from eldr.placement.search import Search, improve

Planner = Callable[[Demand, Geometry, Search, int], Map]
"""demand, geometry, effort, seed -> maps [layers, slots]."""


def linear(demand: Demand, geometry: Geometry, search: Search, seed: int) -> Map:
    """Expert e in slot e, redundant slots from expert 0 on again; what engines start with."""
    return np.tile(np.arange(geometry.slots) % geometry.experts, (demand.layers, 1))


def token_balance(demand: Demand, geometry: Geometry, search: Search, seed: int) -> Map:
    """Replicas and packing by token load, as DeepSeek's EPLB and vLLM's default policy do.

    Different from those: no rank holds an expert twice.
    """
    return _packed(demand.load, geometry)


def activation_balance(demand: Demand, geometry: Geometry, search: Search, seed: int) -> Map:
    """Replicas and packing by the share of steps that touch an expert: even expected activated experts."""
    return _packed(demand.hits, geometry)


def co_activation(demand: Demand, geometry: Geometry, search: Search, seed: int) -> Map:
    """The least expected maximum over ranks under `fewest-activated`: exact where all maps can be tried.

    Otherwise a ring of replicas (`spread`) improved by local search over sampled steps; without redundant slots
    also `linear` improved so. Of all candidates the one that is best on steps set apart.
    """
    sampled = demand.sampled(search.steps_for(demand.layers, geometry.slots), seed).transpose(0, 2, 1)
    if candidates(geometry) <= search.exact_maps:
        maps = all_maps(geometry)
        return np.stack([best_map(layer, maps, geometry) for layer in sampled])
    fit, judge = split(sampled)
    start = np.stack([spread(hits, geometry) for hits in demand.hits])
    found = [improve(fit, judge, start, geometry, search)]
    if not geometry.redundant:
        found.append(linear(demand, geometry, search, seed))
    return best_of(found, sampled, geometry)


PLANNERS: dict[str, Planner] = {
    "linear": linear,
    "token-balance": token_balance,
    "activation-balance": activation_balance,
    "co-activation": co_activation,
}


def split(sampled: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two thirds of the steps to fit, one third to judge, [layers, experts, steps] each; few steps do both."""
    steps = sampled.shape[2]
    if steps < 12:
        return sampled, sampled
    judging = np.arange(steps) % 3 == 2
    return np.ascontiguousarray(sampled[:, :, ~judging]), np.ascontiguousarray(sampled[:, :, judging])


def best_of(found: list[Map], activated: npt.NDArray[np.bool_], geometry: Geometry) -> Map:
    """Per layer the candidate with the least expected maximum; the first of equals."""
    largest = np.stack([use_fewest_activated(activated, maps, geometry).largest for maps in found])
    best = largest.round(9).argmin(axis=0)
    return np.asarray(np.stack(found)[best, np.arange(len(best))])


def _packed(weights: Float64Array, geometry: Geometry) -> Map:
    return np.stack([pack(row, replicate(row, geometry), geometry) for row in weights])
