"""The policies by name."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eldr.routing.contract import Policy, PolicyError
from eldr.routing.domain import Domain
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.locality import LiveLocality, Locality
from eldr.routing.locality_band import LocalityBand
from eldr.routing.locality_band_online import LocalityBandOnline
from eldr.routing.options import Option, resolve
from eldr.routing.p2c import PowerOfTwoChoices
from eldr.routing.predictor import Predictor
from eldr.routing.random_choice import RandomChoice
from eldr.routing.round_robin import RoundRobin
from eldr.routing.step_time import StepTimes
from eldr.routing.union_cost import UnionCost

DEFAULT_POLICY = UnionCost.name


@dataclass(frozen=True, slots=True)
class Sources:
    """What a policy may draw on beside the request and the fleet.

    `live` is there where somebody refits its centroids: in a router, in a simulation.
    """

    seed: int = 0
    step_times: StepTimes = field(default_factory=StepTimes)
    locality: Locality | None = None
    live: LiveLocality | None = None
    predictor: Predictor = field(default_factory=Predictor)


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """How to make a policy, and the options it takes."""

    make: Callable[[Sources, Mapping[str, float]], Policy]
    options: Mapping[str, Option] = field(default_factory=dict)
    needs_profile: bool = False
    needs_live: bool = False


POLICIES: Mapping[str, PolicyKind] = {
    RandomChoice.name: PolicyKind(lambda sources, _: RandomChoice(sources.seed)),
    RoundRobin.name: PolicyKind(lambda _, __: RoundRobin()),
    JoinShortestQueue.name: PolicyKind(lambda sources, _: JoinShortestQueue(sources.seed)),
    PowerOfTwoChoices.name: PolicyKind(lambda sources, _: PowerOfTwoChoices(sources.seed)),
    Domain.name: PolicyKind(lambda sources, options: Domain(options, sources.seed), Domain.OPTIONS),
    LocalityBand.name: PolicyKind(
        lambda sources, options: LocalityBand(sources.locality, options, sources.seed),
        LocalityBand.OPTIONS,
        needs_profile=True,
    ),
    LocalityBandOnline.name: PolicyKind(
        lambda sources, options: LocalityBandOnline(sources.live, options, sources.seed),
        LocalityBandOnline.OPTIONS,
        needs_live=True,
    ),
    UnionCost.name: PolicyKind(
        lambda sources, options: UnionCost(sources.step_times, options, sources.seed, sources.predictor),
        UnionCost.OPTIONS,
    ),
}


def available(sources: Sources) -> tuple[str, ...]:
    """Names that `make_policy` takes with these sources, sorted."""
    return tuple(
        sorted(
            name
            for name, kind in POLICIES.items()
            if (sources.locality or not kind.needs_profile) and (sources.live or not kind.needs_live)
        )
    )


def make_policy(name: str, options: Mapping[str, float], sources: Sources) -> Policy:
    """A policy with the options given, the others at their defaults.

    Raises PolicyError on an unknown name or option, an option out of range, or a missing profile.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, 1)
        hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(POLICIES))}"
        raise PolicyError(f"unknown policy {name!r}{hint}")
    kind = POLICIES[name]
    return kind.make(sources, resolve(name, kind.options, options))
