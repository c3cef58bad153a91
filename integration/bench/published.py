"""The simulator against the published results: the static band's changes of TPOT against the best load balancer.

    python -m integration.bench published [--setup NAME] [--seeds N] [--duration S] [--quick] [--fit] [--json FILE]

Runs the scenarios of `integration/scenarios/published` (8P16D, 512 output tokens, 20 to 100 requests per second) under
random, round-robin, jsq, p2c and the static locality band. The step-time models are fitted to the published medians of
round-robin and of Domain on the task mix; the band's changes, and everything of the language mix, are predictions.
Changes are in percent against the best of the four balancers in each cell; the difference is in points of the mean over
the rates, against the artifact's and the paper's. --fit repeats the fit of the step-time models and ends. --quick
simulates 40 s with one seed.
"""

import argparse
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eldr.cli.simulate import PIPED_WIDTH
from eldr.simulator.runs import Run
from eldr.simulator.scenario import load_scenario
from eldr.simulator.suite import run_all
from integration.bench._published import PUBLISHED, RATES, StepFit, step_fit
from integration.bench.policies import cells_of

SCENARIOS = Path(__file__).parent.parent / "scenarios" / "published"
BAND = "locality-band"
GOAL_POINTS = 3.0


@dataclass(frozen=True, slots=True)
class RateRow:
    """One setup at one rate. Published changes are the artifact's."""

    setup: str
    rate: float
    rr_p50_ms: float
    rr_p50_published_ms: float
    p50: float
    p50_published: float
    p99: float
    p99_published: float
    union_vs_rr: float


@dataclass(frozen=True, slots=True)
class SetupRow:
    """Means over the rates; `_off` are points from the artifact's and the paper's."""

    setup: str
    p50: float
    p50_artifact: float
    p50_paper: float
    p99: float
    p99_artifact: float
    p99_paper: float
    rr_p50_error: float
    """Mean of the absolute relative errors of round-robin's P50, in percent."""
    p50_off: tuple[float, float]
    p99_off: tuple[float, float]

    @property
    def within(self) -> tuple[bool, bool]:
        """Whether P50 and P99 are within GOAL_POINTS of the artifact's mean."""
        return abs(self.p50_off[0]) <= GOAL_POINTS, abs(self.p99_off[0]) <= GOAL_POINTS


def rate_row(setup: str, rate: float, runs: Sequence[Run]) -> RateRow:
    """From the runs of one setup at one of RATES."""
    known, at = PUBLISHED[setup], RATES.index(rate)
    (band,) = (cell for cell in cells_of(setup, rate, runs) if cell.policy == BAND)
    rr = float(np.mean([run.figures.tpot_p50_ms for run in runs if run.policy == "round-robin"]))
    return RateRow(
        setup=setup,
        rate=rate,
        rr_p50_ms=rr,
        rr_p50_published_ms=known.rr_p50_ms[at],
        p50=band.tpot_p50_vs_lb,
        p50_published=known.p50[at],
        p99=band.tpot_p99_vs_lb,
        p99_published=known.p99[at],
        union_vs_rr=band.union_vs_rr,
    )


def setup_row(rows: Sequence[RateRow]) -> SetupRow:
    """Means over the rates of one setup."""
    known = PUBLISHED[rows[0].setup]
    p50, p99 = (float(np.mean([getattr(row, name) for row in rows])) for name in ("p50", "p99"))
    artifact_p50 = float(np.mean([row.p50_published for row in rows]))
    artifact_p99 = float(np.mean([row.p99_published for row in rows]))
    return SetupRow(
        setup=rows[0].setup,
        p50=p50,
        p50_artifact=artifact_p50,
        p50_paper=known.paper_p50,
        p99=p99,
        p99_artifact=artifact_p99,
        p99_paper=known.paper_p99,
        rr_p50_error=100 * float(np.mean([abs(row.rr_p50_ms / row.rr_p50_published_ms - 1) for row in rows])),
        p50_off=(p50 - artifact_p50, p50 - known.paper_p50),
        p99_off=(p99 - artifact_p99, p99 - known.paper_p99),
    )


def rate_table(rows: Sequence[RateRow]) -> Table:
    """One row per setup and rate."""
    out = Table(title="static band against the best load balancer, simulated / published (artifact)")
    out.add_column("setup", no_wrap=True)
    for heading in ("rate", "RR P50 ms", "P50 %", "P99 %", "experts vs RR %"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        out.add_row(
            row.setup,
            f"{row.rate:g}",
            f"{row.rr_p50_ms:.1f} / {row.rr_p50_published_ms:.1f}",
            f"{row.p50:+.1f} / {row.p50_published:+.1f}",
            f"{row.p99:+.1f} / {row.p99_published:+.1f}",
            f"{row.union_vs_rr:+.1f}",
        )
    return out


def setup_table(rows: Sequence[SetupRow]) -> Table:
    """One row per setup."""
    out = Table(title="means over the rates, %: simulated, artifact, paper")
    out.add_column("setup", no_wrap=True)
    for heading in ("P50", f"within {GOAL_POINTS:g}", "P99", f"within {GOAL_POINTS:g}", "RR P50 error"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        p50, p99 = row.within
        out.add_row(
            row.setup,
            f"{row.p50:+.1f}  {row.p50_artifact:+.1f}  {row.p50_paper:+.1f}",
            "yes" if p50 else "NO",
            f"{row.p99:+.1f}  {row.p99_artifact:+.1f}  {row.p99_paper:+.1f}",
            "yes" if p99 else "NO",
            f"{row.rr_p50_error:.1f}",
        )
    return out


def refit(setup: str) -> StepFit:
    """The step-time model of a task setup."""
    return step_fit(load_scenario(SCENARIOS / f"{setup}.yaml"), PUBLISHED[setup])


def _simulated(setups: Sequence[str], seeds: range, arguments: argparse.Namespace) -> list[RateRow]:
    rows: list[RateRow] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("cells", total=len(setups) * len(RATES))
        for setup in setups:
            for rate in RATES:
                scenario = dataclasses.replace(load_scenario(SCENARIOS / f"{setup}.yaml"), rate=rate)
                duration_s = 40.0 if arguments.quick else arguments.duration
                if duration_s:
                    warmup_s = min(scenario.warmup_s, duration_s / 3)
                    scenario = dataclasses.replace(scenario, duration_s=duration_s, warmup_s=warmup_s)
                jobs = len(os.sched_getaffinity(0))
                rows.append(
                    rate_row(setup, rate, run_all(scenario, SCENARIOS, scenario.policies, seeds, jobs))
                )
                bar.advance(task)
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", choices=sorted(PUBLISHED), help="only this one")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each policy (3)")
    parser.add_argument("--duration", type=float, help="seconds of arrivals, a third of them warm-up")
    parser.add_argument("--quick", action="store_true", help="40 s of arrivals, one seed")
    parser.add_argument("--fit", action="store_true", help="fit the step-time models, print them and end")
    parser.add_argument("--json", type=Path, help="write all rows here")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    shown = Console()
    if not shown.is_terminal:
        shown = Console(width=PIPED_WIDTH)
    if arguments.fit:
        for setup in (name for name, known in PUBLISHED.items() if known.domain_p50_ms):
            fit = refit(setup)
            shown.print(setup, fit.model, "errors in %:", [round(100 * error, 1) for error in fit.errors])
        return
    setups = [arguments.setup] if arguments.setup else list(PUBLISHED)
    rates = _simulated(setups, range(1 if arguments.quick else arguments.seeds), arguments)
    means = [setup_row([row for row in rates if row.setup == setup]) for setup in setups]
    shown.print(rate_table(rates))
    shown.print(setup_table(means))
    if arguments.json:
        data = {"rates": [asdict(row) for row in rates], "means": [asdict(row) for row in means]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
