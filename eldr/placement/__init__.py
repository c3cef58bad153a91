"""Which expert lies in which slot of which rank, and which of its replicas a step uses. Pure: numpy and scipy."""

from eldr.placement.choice import REPLICA_CHOICES, Replicas, choose_by_hash, choose_fewest_activated
from eldr.placement.demand import Demand
from eldr.placement.geometry import Geometry, Map, PlacementError
from eldr.placement.plan import DEFAULT_PLANNER, Plan, PlanSettings, plan
from eldr.placement.planners import PLANNERS
from eldr.placement.search import Search

__all__ = [
    "DEFAULT_PLANNER",
    "PLANNERS",
    "REPLICA_CHOICES",
    "Demand",
    "Geometry",
    "Map",
    "PlacementError",
    "Plan",
    "PlanSettings",
    "Replicas",
    "Search",
    "choose_by_hash",
    "choose_fewest_activated",
    "plan",
]
