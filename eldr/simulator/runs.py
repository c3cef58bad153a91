"""Runs of a scenario: its requests, a profile for the bands, one simulation per policy and seed."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eldr.calibration.counts_file import load_counts
from eldr.calibration.fit_record import ClusterRecord, Provenance
from eldr.calibration.kmeans import spherical_kmeans
from eldr.calibration.profile import Profile
from eldr.routing.union_cost import UnionCost
from eldr.signature.transform import transform_named, unit_rows
from eldr.simulator.clairvoyant import clairvoyance
from eldr.simulator.measures import Figures, figures_of
from eldr.simulator.scenario import ORACLE, Mix, Scenario, ScenarioError, parse_policy
from eldr.simulator.simulation import Arrival, Change, Simulation, Topology, decoder_name
from eldr.simulator.world import FINGERPRINT, Prompt, RecordedWorld, SyntheticWorld, World

TRANSFORM = "count-idf"
"""The bands are fitted as published."""


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a scenario."""

    policy: str
    seed: int
    figures: Figures


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """What a seed of a scenario draws; the same for every policy."""

    arrivals: tuple[Arrival, ...]
    calibration: tuple[Prompt, ...]
    shape: tuple[int, int]
    top_k: int


def world_of(scenario: Scenario, folder: Path) -> World:
    """The scenario's world; a counts file is looked for in `folder`. Raises ScenarioError."""
    plan = scenario.world
    if not plan.counts:
        return SyntheticWorld(plan.shape, scenario.domains, plan.seed)
    path = folder / plan.counts
    if not path.is_file():
        raise ScenarioError(f"world.counts: {path} does not exist")
    counts = load_counts(path)
    try:
        world = RecordedWorld(counts, plan.exact)
    except ValueError as error:
        raise ScenarioError(f"world.counts: {error}") from error
    missing = sorted(set(scenario.domains) - set(world.domains))
    if missing:
        raise ScenarioError(
            f"{plan.counts} has no requests of {', '.join(missing)}; it has {', '.join(world.domains)}"
        )
    return world


def requests_of(scenario: Scenario, world: World, seed: int) -> Requests:
    """Arrivals and calibration prompts of a seed. Equal arguments give equal requests."""
    rng = np.random.default_rng([seed, 1])
    times = _times(scenario, rng)
    domains = _picked([_mix_at(scenario, at_s) for at_s in times], rng)
    prompts = world.draw(domains, rng)
    lengths = _lengths(scenario, len(times), rng)
    arrivals = tuple(
        Arrival(float(at_s), f"r{i}", prompt, int(length))
        for i, (at_s, prompt, length) in enumerate(zip(times, prompts, lengths, strict=True))
    )
    own = np.random.default_rng([seed, 2])
    apart = world.calibration if isinstance(world, RecordedWorld) else world
    calibration = apart.draw(_picked([scenario.calibration] * scenario.calibration_requests, own), own)
    first = calibration[0].signature
    return Requests(arrivals, tuple(calibration), first.shape, first.top_k)


def simulate(scenario: Scenario, requests: Requests, policy: str, seed: int, moments: int = 0) -> Figures:
    """One run; with the clairvoyant bound at `moments` times after the warm-up. Raises PolicyError, ScenarioError."""
    name, options = parse_policy(policy)
    fleet = scenario.fleet
    topology = Topology(
        prefill=fleet.prefill,
        decode=fleet.decode,
        step_time=fleet.step_time,
        speeds={decoder_name(i): fleet.slow_speed for i in range(fleet.slow)},
        max_num_seqs=fleet.max_num_seqs,
        prefill_tokens_per_s=fleet.prefill_tokens_per_s,
        transfer_s=fleet.transfer_s,
        report_period_s=fleet.report_period_s,
        report_delay_s=fleet.report_delay_s,
        report_loss=fleet.report_loss,
        learn_share=fleet.learn_share,
        compensation=fleet.compensation,
        prefix_hit_share=fleet.prefix_hit_share,
        exact=scenario.world.exact,
    )
    fit: Callable[[int], Profile] | None = None
    if name.startswith("locality-band"):
        fit = functools.partial(fitted, requests, seed=seed, balanced=scenario.calibration_balanced)
    simulation = Simulation(
        topology,
        UnionCost.name if name == ORACLE else name,
        options,
        requests.shape,
        requests.top_k,
        profile=fit(fleet.decode) if fit else None,
        changes=changes_of(scenario),
        refit_on_change=fit,
        seed=seed,
        moments_s=moments_s(scenario, moments),
        oracle=name == ORACLE,
    )
    outcomes = simulation.run(requests.arrivals)
    figures = figures_of(outcomes, scenario.warmup_s, scenario.duration_s)
    if not moments:
        return figures
    return dataclasses.replace(figures, bound=clairvoyance(outcomes.moments, seed))


def moments_s(scenario: Scenario, count: int) -> tuple[float, ...]:
    """`count` times at equal distances within the measured time, none at its ends."""
    length_s = scenario.duration_s - scenario.warmup_s
    return tuple(scenario.warmup_s + length_s * (i + 0.5) / count for i in range(count))


def fitted(requests: Requests, clusters: int, seed: int, balanced: bool = True) -> Profile:
    """The published fit of the calibration prompts: count * idf, balanced clusters, one per decoder."""
    counts = np.stack([prompt.signature.counts for prompt in requests.calibration])
    transform = transform_named(TRANSFORM)
    weights = transform.learn(counts)
    layers = tuple(range(requests.shape[0]))
    rows = unit_rows(transform.weigh(counts, weights), layers)
    found = spherical_kmeans(rows.rows[rows.usable], clusters, seed=seed, restarts=4, balanced=balanced)
    return Profile(
        fingerprint=FINGERPRINT,
        moe_layers=layers,
        experts=requests.shape[1],
        top_k=requests.top_k,
        transform=TRANSFORM,
        idf=weights.astype(np.float32),
        layer_mask=layers,
        centroids=found.centroids,
        quality=(),
        clustering=ClusterRecord(
            found.sizes, balanced, found.objective, found.iterations, found.converged, found.distinct
        ),
        provenance=Provenance("", len(counts), "1970-01-01T00:00:00+00:00", "simulated", seed),
    )


def changes_of(scenario: Scenario) -> list[Change]:
    """Joins, drains and failures. Decoders are numbered; the youngest leave first, the oldest fail first."""
    living = list(range(scenario.fleet.decode))
    following = scenario.fleet.decode
    changes = []
    for step in sorted(scenario.changes, key=lambda step: step.at_s):
        if step.fail:
            dead, living = living[: step.fail], living[step.fail :]
            changes.append(Change(step.at_s, "fail", tuple(map(decoder_name, dead))))
        elif step.decode > len(living):
            new = list(range(following, following + step.decode - len(living)))
            following += len(new)
            living += new
            changes.append(Change(step.at_s, "join", tuple(map(decoder_name, new))))
        elif step.decode < len(living):
            gone, living = living[step.decode :], living[: step.decode]
            changes.append(Change(step.at_s, "drain", tuple(map(decoder_name, gone))))
        if not living:
            raise ScenarioError(f"changes: no decoder is left at {step.at_s} s")
    return changes


def _times(scenario: Scenario, rng: np.random.Generator) -> "Sequence[float]":
    if scenario.arrivals:
        return [at_s for at_s in scenario.arrivals if at_s < scenario.duration_s]
    bursts = scenario.bursts
    if bursts is None:
        count = rng.poisson(scenario.rate * scenario.duration_s)
        return np.sort(rng.random(count) * scenario.duration_s).tolist()  # type: ignore[no-any-return]
    period_s = bursts.on_s + bursts.off_s
    quiet = scenario.rate * period_s / (bursts.factor * bursts.on_s + bursts.off_s)
    times: list[float] = []
    at_s = 0.0
    while at_s < scenario.duration_s:
        for length_s, rate in ((bursts.on_s, quiet * bursts.factor), (bursts.off_s, quiet)):
            count = rng.poisson(rate * length_s)
            times += (at_s + np.sort(rng.random(count)) * length_s).tolist()
            at_s += length_s
    return [time_s for time_s in times if time_s < scenario.duration_s]


def _mix_at(scenario: Scenario, at_s: float) -> Mix:
    return [phase for phase in scenario.phases if phase.from_s <= at_s][-1].mix


def _picked(mixes: Sequence[Mix], rng: np.random.Generator) -> list[str]:
    """A domain out of each of `mixes`."""
    known = {id(mix): mix for mix in mixes}
    ends = {key: np.cumsum([mix[name] for name in sorted(mix)]) for key, mix in known.items()}
    names = {key: sorted(mix) for key, mix in known.items()}
    return [
        names[id(mix)][int(np.searchsorted(ends[id(mix)], draw * ends[id(mix)][-1], side="right"))]
        for mix, draw in zip(mixes, rng.random(len(mixes)), strict=True)
    ]


def _lengths(scenario: Scenario, count: int, rng: np.random.Generator) -> "Sequence[int]":
    output = scenario.output
    if output.sigma == 0:
        return [output.tokens] * count
    drawn = rng.lognormal(np.log(output.tokens), output.sigma, count)
    return np.clip(np.rint(drawn), 2, output.most).astype(int).tolist()  # type: ignore[no-any-return]
