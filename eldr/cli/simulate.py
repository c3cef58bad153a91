"""`eldr simulate`: policies compared on a modelled fleet."""

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import structlog
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eldr.calibration.counts import CountsError
from eldr.cli.main import effective
from eldr.routing.contract import PolicyError
from eldr.simulator.measures import EmptyRunError, interval
from eldr.simulator.runs import Run
from eldr.simulator.scenario import Scenario, ScenarioError, load_scenario, parse_policy
from eldr.simulator.suite import run_all

BALANCERS = ("random", "round-robin", "jsq", "p2c")
"""Whose best is what the others are compared with."""

PIPED_WIDTH = 140
"""Columns of a table that no terminal shows, so that no name is cut."""


@click.command(name="simulate")
@click.argument(
    "scenario_path", metavar="SCENARIO", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="NAME or NAME:option=value,... instead of the scenario's. Repeatable.",
)
@click.option("--rate", type=float, help="Requests per second, instead of the scenario's.")
@click.option("--rates", metavar="R,R,...", help="Several rates, one table each; not with --rate.")
@click.option("--duration", type=float, help="Seconds of arrivals, instead of the scenario's.")
@click.option(
    "--seeds", type=click.IntRange(1, 1_000), default=3, show_default=True, help="Runs of each policy."
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes at a time.  [default: one per core]")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write every run here."
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw TPOT, its distribution, experts and the load here; with --rates, TPOT and experts by rate.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    scenario_path: Path,
    policies: tuple[str, ...],
    rate: float | None,
    rates: str | None,
    duration: float | None,
    seeds: int,
    jobs: int | None,
    json_path: Path | None,
    plots: Path | None,
) -> None:
    """Run the policies of SCENARIO (YAML, see docs/simulator.md) on a modelled fleet, behind the real router core.

    Prints time per output token, experts per step and load skew, means over seeds with 95 % intervals, and the
    change against the best load balancer among random, round-robin, jsq and p2c.
    """
    console = Console(stderr=True)
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        scenario = load_scenario(scenario_path)
        if rate is not None and scenario.arrivals:
            raise ScenarioError(
                f"--rate has no meaning here: {scenario_path.name} replays arrivals; drop either"
            )
        scenario = dataclasses.replace(
            scenario,
            rate=scenario.rate if rate is None else rate,
            duration_s=scenario.duration_s if duration is None else duration,
            policies=policies or scenario.policies,
        )
        for policy in scenario.policies:
            parse_policy(policy)
        scenarios = [dataclasses.replace(scenario, rate=each) for each in _rates(rates, rate, scenario)]
        jobs = jobs or len(os.sched_getaffinity(0))
        by_rate = {each.rate: _run(each, scenario_path.parent, seeds, jobs, console) for each in scenarios}
    except (ScenarioError, PolicyError, CountsError, EmptyRunError, OSError) as error:
        raise click.ClickException(str(error)) from error
    shown = Console()
    shown = shown if shown.is_terminal else Console(width=PIPED_WIDTH)
    for each in scenarios:
        shown.print(table(each, by_rate[each.rate]))
    if json_path:
        found = [
            {"rate": each, "runs": [dataclasses.asdict(run) for run in runs]}
            for each, runs in by_rate.items()
        ]
        data = {"scenario": scenario.name} | ({"rates": found} if rates else found[0])
        json_path.write_text(json.dumps(data, indent=1) + "\n")
    if plots:
        from eldr.plots.simulation_figures import save_pictures, save_rate_pictures

        if rates:
            paths = save_rate_pictures(by_rate, plots, scenario.name)
        else:
            title = f"{scenario.name}, {scenarios[0].rate:g} requests/s"
            paths = save_pictures(by_rate[scenarios[0].rate], plots, title)
        for path in paths:
            click.echo(f"wrote {path}")


def _rates(rates: str | None, rate: float | None, scenario: Scenario) -> list[float]:
    """Rates to run, ascending. Raises click.UsageError."""
    if rates is None:
        return [scenario.rate]
    if rate is not None:
        raise click.UsageError("--rate and --rates exclude each other")
    if scenario.arrivals:
        raise click.UsageError("--rates: the scenario replays arrivals, which have their own rate")
    try:
        return sorted({float(part) for part in rates.split(",")})
    except ValueError as error:
        raise click.UsageError(f"--rates must be numbers with commas between, got {rates!r}") from error


def _run(scenario: Scenario, folder: Path, seeds: int, jobs: int, console: Console) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=seeds * len(scenario.policies))
        return run_all(
            scenario,
            folder,
            scenario.policies,
            range(seeds),
            jobs,
            lambda done, _: bar.update(task, completed=done),
        )


def table(scenario: Scenario, runs: Sequence[Run]) -> Table:
    """Means over seeds, and changes against the best load balancer."""
    out = Table(
        title=f"TPOT, {scenario.name}, {scenario.rate:g} requests/s", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    out.add_column("policy", no_wrap=True)
    for heading in (
        "P50 ms",
        "±",
        "change",
        "P99 ms",
        "±",
        "change",
        "TTFT ms",
        "experts",
        "skew",
        "lost",
        "step err",
        "share err",
    ):
        out.add_column(heading, justify="right", no_wrap=True)
    policies = list(dict.fromkeys(run.policy for run in runs))
    by = {policy: [run.figures for run in runs if run.policy == policy] for policy in policies}
    means = {
        name: {policy: interval([getattr(f, name) for f in by[policy]]) for policy in policies}
        for name in ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "union", "skew")
    }
    balancers = [policy for policy in policies if parse_policy(policy)[0] in BALANCERS]
    for policy in policies:
        row = [policy]
        for name in ("tpot_p50_ms", "tpot_p99_ms"):
            mean, half = means[name][policy]
            row += [f"{mean:.2f}", f"{half:.2f}"]
            best = min((means[name][other][0] for other in balancers), default=float("nan"))
            row.append(f"{mean / best - 1:+.1%}" if best == best else "-")
        row += [f"{means[name][policy][0]:.1f}" for name in ("ttft_p50_ms", "union")]
        row.append(f"{means['skew'][policy][0]:.2f}")
        row.append(str(sum(f.refused + f.unfinished for f in by[policy])))
        for errors in ([f.step_time_error for f in by[policy]], [f.share_error for f in by[policy]]):
            known = [error for error in errors if error is not None]
            row.append(f"{np.mean(known):.1%}" if known else "-")
        out.add_row(*row)
    return out
