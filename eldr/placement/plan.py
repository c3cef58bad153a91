"""A checked plan: the map of a planner, on nodes, with as little to move as pays."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eldr.placement.demand import Demand
from eldr.placement.geometry import Geometry, Map, PlacementError
from eldr.placement.moves import aligned, moved
from eldr.placement.planners import PLANNERS
from eldr.placement.replay import even_split, use_fewest_activated
from eldr.placement.search import Search, improve

DEFAULT_PLANNER = "co-activation"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How to plan.

    planner: a name of `PLANNERS`.
    min_steps: with fewer observed steps the present map stays.
    move_cost: activated experts by which the largest rank of a step must shrink for each expert that moves; what
        moving is worth depends on the link and on how long a plan lives.
    expert_bytes: weights of one expert of one layer, for `Plan.moved_bytes`.
    seed: equal inputs and seeds give equal plans.
    Raises PlacementError naming the field.
    """

    planner: str = DEFAULT_PLANNER
    min_steps: float = 0.0
    move_cost: float = 0.0
    expert_bytes: int = 0
    seed: int = 0
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        if self.planner not in PLANNERS:
            raise PlacementError(f"planner must be one of {', '.join(PLANNERS)}, got {self.planner!r}")
        for name in ("min_steps", "move_cost", "expert_bytes"):
            if not 0 <= getattr(self, name) < np.inf:
                raise PlacementError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """maps: [layers, slots], valid under `geometry`.

    expected_max: expected largest number of activated experts on a rank under `fewest-activated`, [layers], on the
        steps that were planned on; `present_max` the same for the present map, or for `linear` without one.
    bound: no placement has less, [layers]: the mean of ceil(activated experts / ranks).
    moved_experts: experts that ranks have to fetch, [layers]; zeros without a present map.
    kept: layers that keep their map (or `linear`) because nothing, or too little, is known of them.
    """

    planner: str
    geometry: Geometry
    maps: Map
    expected_max: npt.NDArray[np.float64]
    present_max: npt.NDArray[np.float64]
    bound: npt.NDArray[np.float64]
    moved_experts: npt.NDArray[np.int64]
    moved_bytes: int
    kept: tuple[int, ...]


def plan(
    demand: Demand, geometry: Geometry, settings: PlanSettings | None = None, present: Map | None = None
) -> Plan:
    """Plans every layer. Deterministic.

    present: the map that is in use, [layers, slots]. A layer whose new map does not gain what its moves cost keeps
    it (planners by activation; the others move whatever their rule says, by the fewest moves).
    Raises PlacementError where demand, geometry and present map do not fit each other.
    """
    settings = PlanSettings() if settings is None else settings
    if demand.experts != geometry.experts:
        raise PlacementError(f"demand has {demand.experts} experts, the geometry {geometry.experts}")
    effort = (settings.search, settings.seed)
    base = _on_nodes("linear", demand, geometry, effort)
    if present is not None:
        base = geometry.check_map(present, demand.layers, "present map")
    kept = demand.idle.copy()
    if demand.observed_steps is not None and demand.observed_steps < settings.min_steps:
        kept[:] = True
    maps = base.copy()
    busy = np.flatnonzero(~kept)
    if busy.size:
        part = demand.of_layers(busy)
        maps[busy] = _on_nodes(settings.planner, part, geometry, effort)
        if present is not None:
            maps[busy] = _least_moves(part, maps[busy], base[busy], geometry, settings)
    maps = geometry.check_map(maps, demand.layers, "planned map")
    activated = _sampled(demand, geometry, settings)
    fetched = moved(maps, base, geometry) if present is not None else np.zeros(demand.layers, dtype=np.int64)
    return Plan(
        settings.planner,
        geometry,
        maps,
        use_fewest_activated(activated, maps, geometry).largest,
        use_fewest_activated(activated, base, geometry).largest,
        even_split(activated, geometry.ranks),
        fetched,
        int(fetched.sum()) * settings.expert_bytes,
        tuple(map(int, np.flatnonzero(kept))),
    )


def _on_nodes(planner: str, demand: Demand, geometry: Geometry, effort: tuple[Search, int]) -> Map:
    """Splits the experts over the nodes by the planner's own rule, then plans each node for itself."""
    make = PLANNERS[planner]
    if geometry.nodes == 1:
        return make(demand, geometry, *effort)
    nodes = geometry.nodes
    shares = make(demand, Geometry(geometry.experts, nodes, geometry.experts), *effort)
    shares = np.sort(shares.reshape(demand.layers, nodes, -1), axis=2)
    inside = Geometry(geometry.experts // nodes, geometry.ranks // nodes, geometry.slots // nodes)
    parts = []
    for node in range(nodes):
        members = shares[:, node]
        parts.append(np.take_along_axis(members, make(demand.of_experts(members), inside, *effort), axis=1))
    return np.concatenate(parts, axis=1)


def _least_moves(demand: Demand, maps: Map, present: Map, geometry: Geometry, settings: PlanSettings) -> Map:
    """Per layer the cheapest of the new map, the present one, and the present one improved; moves are charged."""
    found = [aligned(maps, present, geometry)]
    if settings.planner not in ("activation-balance", "co-activation"):
        return found[0]
    activated = _sampled(demand, geometry, settings)
    found.insert(0, present)
    if settings.planner == "co-activation" and geometry.nodes == 1:
        found.append(
            aligned(improve(activated, activated, present, geometry, settings.search), present, geometry)
        )
    cost = [
        use_fewest_activated(activated, each, geometry).largest
        + settings.move_cost * moved(each, present, geometry)
        for each in found
    ]
    best = np.stack(cost).round(9).argmin(axis=0)
    return np.asarray(np.stack(found)[best, np.arange(len(best))])


def _sampled(demand: Demand, geometry: Geometry, settings: PlanSettings) -> npt.NDArray[np.bool_]:
    """Steps to measure maps on, [layers, experts, steps]."""
    steps = settings.search.steps_for(demand.layers, geometry.slots)
    return np.ascontiguousarray(demand.sampled(steps, settings.seed).transpose(0, 2, 1))
