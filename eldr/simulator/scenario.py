"""A scenario: what is simulated, read from YAML and checked."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from eldr.routing.registry import POLICIES
from eldr.simulator.arrivals_file import ArrivalsError, checked_arrivals, load_arrivals
from eldr.simulator.compensation import Compensation
from eldr.simulator.step_time import MODELS, StepTime
from eldr.simulator.world import WorldShape

DEFAULT_POLICIES = (
    *("random", "round-robin", "jsq", "p2c"),
    *("locality-band", "locality-band-online", "union-cost"),
)

ORACLE = "union-cost-oracle"
"""`union-cost` that is told the true decode shares; exists only here, no router can have it."""

T = TypeVar("T")
Mix = Mapping[str, float]


class ScenarioError(ValueError):
    """A scenario that cannot be simulated; the message names the key and what is allowed."""


@dataclass(frozen=True, slots=True)
class Phase:
    """From `from_s` on, requests come of these domains in these proportions."""

    from_s: float
    mix: Mix


@dataclass(frozen=True, slots=True)
class Bursts:
    """Poisson arrivals whose rate is `factor` times higher for `on_s` than for `off_s`, with the same mean."""

    on_s: float = 5.0
    off_s: float = 5.0
    factor: float = 3.0


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens to generate: `tokens` each, or lognormal around that median where `sigma` is above 0."""

    tokens: int = 512
    sigma: float = 0.0
    most: int = 4096


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet. Decoders `slow` run at `slow_speed` of the others' speed.

    `learn_share`: of the requests, whose decode counts the router is told when they end. `compensation`: see there.
    `prefix_hit_share`: of every prompt's tokens, which need no prefill.
    """

    prefill: int = 8
    decode: int = 16
    step_time: StepTime = MODELS["synthetic"]
    slow: int = 0
    slow_speed: float = 0.7
    max_num_seqs: int = 512
    prefill_tokens_per_s: float = 20_000.0
    transfer_s: float = 0.005
    report_period_s: float = 0.5
    report_delay_s: float = 0.0
    report_loss: float = 0.0
    learn_share: float = 0.0
    compensation: Compensation = Compensation.FULL
    prefix_hit_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """At a time, the fleet has `decode` decoders from now on, or `fail` of them die."""

    at_s: float
    decode: int = 0
    fail: int = 0


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """`counts`: a counts file instead of the synthetic world; `exact`: unions of its single steps' picks."""

    seed: int = 0
    shape: WorldShape = field(default_factory=WorldShape)
    counts: str = ""
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """See `docs/simulator.md` for every key. `calibration` is the mix that a profile for the bands is fitted on."""

    name: str
    phases: tuple[Phase, ...]
    calibration: Mix
    world: WorldPlan = field(default_factory=WorldPlan)
    rate: float = 80.0
    duration_s: float = 120.0
    warmup_s: float = 30.0
    bursts: Bursts | None = None
    arrivals: tuple[float, ...] = ()
    """Replayed arrival times in seconds instead of those that `rate` draws."""
    output: Output = field(default_factory=Output)
    fleet: FleetPlan = field(default_factory=FleetPlan)
    changes: tuple[Step, ...] = ()
    calibration_requests: int = 1_000
    calibration_balanced: bool = True
    policies: tuple[str, ...] = DEFAULT_POLICIES

    def __post_init__(self) -> None:
        if not self.name:
            raise ScenarioError("name must not be empty")
        for name, low, high in (
            ("rate", 0.001, 1e5),
            ("duration_s", 0.1, 1e6),
            ("warmup_s", 0.0, self.duration_s - 0.05),
            ("calibration_requests", 20, 100_000),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ScenarioError(f"{name} must be a number, got {value!r}")
            if not low <= value <= high:
                raise ScenarioError(f"{name} must be {low:g} to {high:g}, got {value:g}")
        if self.arrivals and self.arrivals[0] >= self.duration_s:
            raise ScenarioError(
                f"arrivals: the first comes at {self.arrivals[0]:g} s, after duration_s {self.duration_s:g}"
            )
        if self.arrivals and self.bursts:
            raise ScenarioError("arrivals and bursts exclude each other")
        if not self.phases or self.phases[0].from_s != 0:
            raise ScenarioError("the first phase must begin at from_s 0")
        for phase in self.phases:
            _check_mix("mix", phase.mix)
        _check_mix("calibration", self.calibration)
        fleet = self.fleet
        if fleet.prefill < 1 or fleet.decode < 1:
            raise ScenarioError(
                f"fleet needs at least 1 prefill and 1 decode, got {fleet.prefill}, {fleet.decode}"
            )
        if not 0 <= fleet.slow <= fleet.decode:
            raise ScenarioError(f"fleet.slow must be 0 to {fleet.decode}, got {fleet.slow}")
        if not 0 <= fleet.report_loss < 1:
            raise ScenarioError(f"fleet.report_loss must be 0 to below 1, got {fleet.report_loss}")
        for name in ("learn_share", "prefix_hit_share"):
            if not 0 <= getattr(fleet, name) <= 1:
                raise ScenarioError(f"fleet.{name} must be 0 to 1, got {getattr(fleet, name)}")
        for name in ("report_period_s", "prefill_tokens_per_s", "slow_speed"):
            if not getattr(fleet, name) > 0:
                raise ScenarioError(f"fleet.{name} must be above 0, got {getattr(fleet, name)}")
        for name in ("report_delay_s", "transfer_s"):
            if not getattr(fleet, name) >= 0:
                raise ScenarioError(f"fleet.{name} must not be negative, got {getattr(fleet, name)}")
        if fleet.max_num_seqs < 1:
            raise ScenarioError(f"fleet.max_num_seqs must be at least 1, got {fleet.max_num_seqs}")
        if self.output.tokens < 1:
            raise ScenarioError(f"output.tokens must be at least 1, got {self.output.tokens}")
        for policy in self.policies:
            name = policy.partition(":")[0]
            if name not in POLICIES and name != ORACLE:
                raise ScenarioError(f"policies: {_unknown(name, {*POLICIES, ORACLE})}")

    @property
    def domains(self) -> tuple[str, ...]:
        """Every domain of a phase or of the calibration, sorted."""
        named = {name for phase in self.phases for name in phase.mix} | set(self.calibration)
        return tuple(sorted(named))


def load_scenario(path: Path) -> Scenario:
    """Reads a scenario. Raises ScenarioError for what is wrong with it, with a suggestion for unknown keys."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path.name} is no YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ScenarioError(f"{path.name} must be a mapping")
    if isinstance(raw.get("arrivals"), str):
        try:
            raw["arrivals"] = load_arrivals(path.parent / raw["arrivals"])
        except (ArrivalsError, OSError) as error:
            raise ScenarioError(f"arrivals: {error}") from error
    return scenario_of(raw)


def scenario_of(raw: Mapping[str, Any]) -> Scenario:
    """A scenario from plain data; `mix` stands for a single phase, `step_time` may name a model."""
    values = dict(raw)
    if "mix" in values:
        values["phases"] = [{"from_s": 0, "mix": values.pop("mix")}]
    phases = values.pop("phases", None)
    if not isinstance(phases, list) or not phases:
        raise ScenarioError("mix, or a list of phases, is missing")
    values["phases"] = tuple(_read(Phase, phase, "phases") for phase in phases)
    values.setdefault("calibration", values["phases"][0].mix)
    for key, kind in (("bursts", Bursts), ("output", Output)):
        if key in values:
            values[key] = _read(kind, values[key], key)
    if "world" in values:
        world = dict(_mapping(values["world"], "world"))
        if "shape" in world:
            world["shape"] = _read(WorldShape, world["shape"], "world.shape")
        values["world"] = _read(WorldPlan, world, "world")
    if "fleet" in values:
        fleet = dict(_mapping(values["fleet"], "fleet"))
        if "step_time" in fleet:
            fleet["step_time"] = _step_time(fleet["step_time"])
        if "compensation" in fleet:
            fleet["compensation"] = _compensation(fleet["compensation"])
        values["fleet"] = _read(FleetPlan, fleet, "fleet")
    if "changes" in values:
        values["changes"] = tuple(_read(Step, change, "changes") for change in values["changes"])
    if "arrivals" in values:
        values["arrivals"] = _arrivals(values["arrivals"])
    if "policies" in values:
        values["policies"] = tuple(values["policies"])
    return _read(Scenario, values, "the scenario")


def parse_policy(text: str) -> tuple[str, dict[str, float]]:
    """`name` or `name:option=value,option=value`. Raises ScenarioError."""
    name, _, rest = text.partition(":")
    options = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ScenarioError(f"policy {text!r}: options are name=number, got {part!r}")
    return name, options


def _arrivals(value: Any) -> tuple[float, ...]:
    if isinstance(value, str):
        raise ScenarioError("arrivals: a file is read only beside a scenario file; give a list of seconds")
    if not isinstance(value, list | tuple):
        raise ScenarioError(f"arrivals must be a file name or a list of seconds, got {value!r}")
    try:
        return checked_arrivals(value, "arrivals")
    except ArrivalsError as error:
        raise ScenarioError(str(error)) from error


def _compensation(value: Any) -> Compensation:
    try:
        return Compensation(value)
    except ValueError as error:
        known = ", ".join(Compensation)
        raise ScenarioError(f"fleet.compensation must be one of {known}, got {value!r}") from error


def _step_time(value: Any) -> StepTime:
    if isinstance(value, str):
        if value not in MODELS:
            raise ScenarioError(f"fleet.step_time: {_unknown(value, MODELS)}")
        return MODELS[value]
    given = dict(_mapping(value, "fleet.step_time"))
    if "factors" in given:
        given["factors"] = tuple((int(size), float(factor)) for size, factor in given["factors"])
    return _read(StepTime, given, "fleet.step_time")


def _read(kind: type[T], value: Any, where: str) -> T:
    given = _mapping(value, where)
    known = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ScenarioError(f"{where}: {_unknown(str(key), known)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise ScenarioError(f"{where}: {error}") from error
    except ScenarioError:
        raise
    except ValueError as error:
        raise ScenarioError(f"{where}: {error}") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ScenarioError(f"{where} must be a mapping, got {value!r}")
    return value


def _unknown(name: str, known: "set[str] | Mapping[str, Any]") -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {name!r}; {hint}"


def _check_mix(key: str, mix: Any) -> None:
    if not isinstance(mix, Mapping) or not mix:
        raise ScenarioError(f"{key} must be a mapping from domain to weight")
    for name, weight in mix.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ScenarioError(f"{key}.{name} must be a weight of at least 0, got {weight!r}")
    if sum(mix.values()) <= 0:
        raise ScenarioError(f"{key} must have a weight above 0")
