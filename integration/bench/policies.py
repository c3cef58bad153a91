"""The policies on the scenario suite: changes of TPOT against the best load balancer in each cell.

    python -m integration.bench policies [--scenario NAME] [--traces PATH] [--full] [--quick] [--bound] [--json FILE]

A cell is a scenario at a rate: 40 and 80 requests per second with 3 seeds, with --full 20 to 100 and 5 seeds, with
--quick 20 simulated seconds and one seed. Every policy meets the same requests. Changes are in percent of the means
over seeds; the best load balancer is that of random, round-robin, jsq and p2c with the least value in that cell,
taken for P50 and P99 on its own. The intervals are 95 % over the seeds of the paired change against it.
With --traces the scenarios are those of recorded routes, with the exact union of every step: the testbed's traces file,
or a file or folder of public ones (`expert_ids`, `offsets`). Calibration and traffic draw from different
requests. `union-cost-oracle` is `union-cost` told the true decode shares, which no router can have.
With --bound a second table (key `bounds`) has the clairvoyant bound: the requests in flight at MOMENTS times of every
run, placed anew by a local search that knows their true shares; balanced is a random deal of the same requests.
"""

import argparse
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eldr.cli.simulate import BALANCERS, PIPED_WIDTH
from eldr.simulator.clairvoyant import Clairvoyance
from eldr.simulator.measures import interval
from eldr.simulator.runs import Run
from eldr.simulator.scenario import ORACLE, Scenario, load_scenario
from eldr.simulator.suite import run_all
from integration.bench._traces import prepared

SCENARIOS = Path(__file__).parent.parent / "scenarios"
MOMENTS = 4
RATES, FULL_RATES = (40.0, 80.0), (20.0, 40.0, 60.0, 80.0, 100.0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy in one cell; changes in percent, intervals as (low, high) in percent."""

    scenario: str
    rate: float
    policy: str
    tpot_p50_vs_lb: float
    tpot_p99_vs_lb: float
    p50_ci: tuple[float, float]
    p99_ci: tuple[float, float]
    union_vs_rr: float


@dataclass(frozen=True, slots=True)
class Bound:
    """One policy in one cell against the clairvoyant bound.

    Mean step times per request in ms: `balanced_ms` of random deals of the requests that were in flight, `placed_ms`
    as the policy placed them, `best_ms` as the search did. `possible` and `gained` are the reductions of the last two
    against the first in percent, `reached` the share of the one that the other is, in percent.
    """

    scenario: str
    rate: float
    policy: str
    balanced_ms: float
    placed_ms: float
    best_ms: float
    possible: float
    gained: float
    reached: float


def bounds_of(scenario: str, rate: float, runs: Sequence[Run]) -> list[Bound]:
    """Means over the seeds of each policy, of runs that have a bound."""
    bounds = []
    for policy in dict.fromkeys(run.policy for run in runs):
        found = [run.figures.bound for run in runs if run.policy == policy and run.figures.bound is not None]
        if found:
            times = np.mean([(one.balanced_ms, one.placed_ms, one.best_ms) for one in found], axis=0)
            mean = Clairvoyance(*times.tolist())
            gained = 1 - mean.placed_ms / mean.balanced_ms
            shares = (100 * share for share in (mean.possible, gained, mean.reached))
            bounds.append(Bound(scenario, rate, policy, *times.tolist(), *shares))
    return bounds


def cells_of(scenario: str, rate: float, runs: Sequence[Run]) -> list[Cell]:
    """Cells of the runs of one scenario at one rate, in the order of their policies."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    values: dict[str, Mapping[str, list[float]]] = {
        name: {
            policy: [getattr(run.figures, name) for run in runs if run.policy == policy]
            for policy in policies
        }
        for name in ("tpot_p50_ms", "tpot_p99_ms", "union")
    }
    cells = []
    for policy in policies:
        changes = {}
        for name in ("tpot_p50_ms", "tpot_p99_ms"):
            best = min((p for p in policies if p in BALANCERS), key=lambda p: np.mean(values[name][p]))
            changes[name] = change(values[name][policy], values[name][best])
        union, _ = change(values["union"][policy], values["union"]["round-robin"])
        (p50, p50_ci), (p99, p99_ci) = changes["tpot_p50_ms"], changes["tpot_p99_ms"]
        cells.append(Cell(scenario, rate, policy, p50, p99, p50_ci, p99_ci, union))
    return cells


def change(values: Sequence[float], against: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Change of the mean in percent, and the interval of the changes of each seed around it."""
    mean = 100 * (float(np.mean(values)) / float(np.mean(against)) - 1)
    _, half = interval([100 * (a / b - 1) for a, b in zip(values, against, strict=True)])
    return mean, (mean - half, mean + half)


def table(cells: Sequence[Cell]) -> Table:
    """One row per cell and policy."""
    out = Table(title="TPOT against the best load balancer, %")
    out.add_column("scenario", no_wrap=True)
    for heading in ("rate", "policy", "P50", "±", "P99", "±", "experts vs RR"):
        out.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        out.add_row(
            cell.scenario,
            f"{cell.rate:g}",
            cell.policy,
            f"{cell.tpot_p50_vs_lb:+.1f}",
            f"{cell.p50_ci[1] - cell.tpot_p50_vs_lb:.1f}",
            f"{cell.tpot_p99_vs_lb:+.1f}",
            f"{cell.p99_ci[1] - cell.tpot_p99_vs_lb:.1f}",
            f"{cell.union_vs_rr:+.1f}",
        )
    return out


def bound_table(bounds: Sequence[Bound]) -> Table:
    """One row per cell and policy."""
    out = Table(title="Mean step time of the requests in flight against a balanced deal, %")
    out.add_column("scenario", no_wrap=True)
    for heading in ("rate", "policy", "balanced ms", "gained", "possible", "reached"):
        out.add_column(heading, justify="right", no_wrap=True)
    for bound in bounds:
        out.add_row(
            bound.scenario,
            f"{bound.rate:g}",
            bound.policy,
            f"{bound.balanced_ms:.2f}",
            f"{bound.gained:.1f}",
            f"{bound.possible:.1f}",
            f"{bound.reached:.0f}",
        )
    return out


def measured(
    scenarios: Sequence[Scenario], folder: Path, seeds: range, arguments: argparse.Namespace
) -> tuple[list[Cell], list[Bound]]:
    """Cells of every scenario and rate, and their bounds where asked for; `arguments` are the command line's."""
    todo = [(each, rate) for each in scenarios for rate in (FULL_RATES if arguments.full else RATES)]
    cells: list[Cell] = []
    bounds: list[Bound] = []
    moments = MOMENTS if arguments.bound else 0
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("cells", total=len(todo))
        for each, rate in todo:
            scenario = dataclasses.replace(each, rate=rate)
            duration_s = 20.0 if arguments.quick else arguments.duration
            if duration_s:
                warmup_s = min(scenario.warmup_s, duration_s / 4)
                scenario = dataclasses.replace(scenario, duration_s=duration_s, warmup_s=warmup_s)
            jobs = len(os.sched_getaffinity(0))
            policies = (*scenario.policies, ORACLE)
            runs = run_all(scenario, folder, policies, seeds, jobs, moments=moments)
            cells += cells_of(each.name, rate, runs)
            bounds += bounds_of(each.name, rate, runs)
            if arguments.json:
                found = {"cells": [asdict(cell) for cell in cells]}
                if moments:
                    found["bounds"] = [asdict(bound) for bound in bounds]
                arguments.json.write_text(json.dumps(found, indent=1))
            bar.advance(task)
    return cells, bounds


def main() -> None:
    """Entry point."""
    names = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=names, help="only this one")
    parser.add_argument(
        "--traces", type=Path, help="recorded routes instead of the suite: a file or a folder"
    )
    parser.add_argument("--full", action="store_true", help="rates 20 to 100, 5 seeds")
    parser.add_argument("--quick", action="store_true", help="20 s of arrivals, one seed")
    parser.add_argument("--bound", action="store_true", help="the clairvoyant bound beside the cells; slower")
    parser.add_argument("--duration", type=float, help="seconds of arrivals, a quarter of them warm-up")
    parser.add_argument("--json", type=Path, help="write the cells here, after each scenario and rate")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seeds = range(1 if arguments.quick else 5 if arguments.full else 3)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if arguments.traces else SCENARIOS
        if arguments.traces:
            scenarios = prepared(arguments.traces, folder)
        else:
            chosen = [arguments.scenario] if arguments.scenario else names
            scenarios = [load_scenario(SCENARIOS / f"{name}.yaml") for name in chosen]
        cells, bounds = measured(scenarios, folder, seeds, arguments)
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PIPED_WIDTH)
    shown.print(table(cells))
    if bounds:
        shown.print(bound_table(bounds))


if __name__ == "__main__":
    main()
