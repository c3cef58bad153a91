"""What each part of a policy is worth: changes of TPOT with one thing turned off or set otherwise.

    python -m integration.bench ablations [--group NAME] [--seeds N] [--quick] [--json FILE]

Scenarios steady, skew and bursts at 80 requests per second, 8P16D, 60 s of arrivals of which the first 20 s are not
measured, 5 seeds (with --quick 20 s, 5 s and one seed). FILE is written after each seed, with the seeds so far. A
variant and its base meet the same requests of a seed; changes are in percent of the base's means over seeds, with the
95 % interval of the paired changes. Bases are `union-cost`, `locality-band` and `locality-band-online` with their
defaults. A `true shares` variant cannot be had live. Prefix hits without signatures leave the router the picks of the
other tokens alone.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from eldr.cli.simulate import PIPED_WIDTH
from eldr.simulator.measures import Figures
from eldr.simulator.runs import Requests, requests_of, simulate, world_of
from eldr.simulator.scenario import ORACLE, scenario_of
from integration.bench.policies import SCENARIOS, change

NAMES = ("steady", "skew", "bursts")
RATE = 80.0
ARRIVALS_S, WARMUP_S = 60.0, 20.0
SEEDS, TOGETHER = 5, 8
"""Seeds without --seeds; variants that one process takes at a time, for which it draws the requests once."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, and what is otherwise in the scenario. `base` names the variant that it is compared with."""

    name: str
    policy: str
    base: str = "union-cost"
    group: str = ""
    scenario: Mapping[str, Any] = field(default_factory=dict)


def _fleet(**settings: Any) -> Mapping[str, Any]:
    return {"fleet": settings}


def _prefix(hits: float, signed: float = 1.0) -> Mapping[str, Any]:
    return {"fleet": {"prefix_hit_share": hits}, "world": {"shape": {"signed_share": signed}}}


BASES = tuple(Variant(name, name, name) for name in ("union-cost", "locality-band", "locality-band-online"))
VARIANTS = (
    *BASES,
    Variant("jsq", "jsq", group="reference"),
    Variant("power 1", "union-cost:power=1", group="power"),
    Variant("power 3", "union-cost:power=3", group="power"),
    Variant("power 12", "union-cost:power=12", group="power"),
    Variant("power 6 at any load", "union-cost:power_load=0", group="power"),
    Variant("guard 5 %", "union-cost:tail_guard=0.05", group="guard"),
    Variant("guard 5 %, power 1", "union-cost:power=1,tail_guard=0.05", group="guard"),
    Variant("learned from all requests", "union-cost", group="predictor", scenario=_fleet(learn_share=1.0)),
    Variant("true shares", ORACLE, group="predictor"),
    Variant(
        "unreported only", "union-cost", group="compensation", scenario=_fleet(compensation="unreported")
    ),
    Variant("none", "union-cost", group="compensation", scenario=_fleet(compensation="none")),
    Variant(
        "none, reports each 1 s",
        "union-cost",
        group="compensation",
        scenario=_fleet(compensation="none", report_period_s=1.0),
    ),
    *(
        Variant(f"{period:g} s", "union-cost", group="report period", scenario=_fleet(report_period_s=period))
        for period in (0.1, 0.25, 1.0)
    ),
    *(
        Variant(f"ratio {ratio:g}", f"union-cost:max_load_ratio={ratio:g}", group="balance")
        for ratio in (0, 1.2)
    ),
    Variant("50 % hits", "union-cost", group="prefix cache", scenario=_prefix(0.5)),
    Variant("50 % hits, no signatures", "union-cost", group="prefix cache", scenario=_prefix(0.5, 0.5)),
    Variant("90 % hits, no signatures", "union-cost", group="prefix cache", scenario=_prefix(0.9, 0.1)),
    *(
        Variant(f"{band}, tau {tau:g}", f"{band}:tau={tau:g}", band, "tau")
        for band in ("locality-band", "locality-band-online")
        for tau in (0, 0.2)
    ),
    Variant("locality-band, no ratio", "locality-band:max_load_ratio=0", "locality-band", "balance"),
    Variant(
        "locality-band, clusters of any size",
        "locality-band",
        "locality-band",
        "balance",
        {"calibration_balanced": False},
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A variant in a scenario against its base: changes in percent, intervals as (low, high) in percent."""

    group: str
    variant: str
    base: str
    scenario: str
    rate: float
    tpot_p50_vs_base: float
    tpot_p99_vs_base: float
    p50_ci: tuple[float, float]
    p99_ci: tuple[float, float]
    ttft_p50_vs_base: float
    union_vs_base: float
    share_error: float | None


Found = Mapping[tuple[str, str, int], Figures]
"""By scenario, variant and seed."""


def rows_of(found: Found, variants: Sequence[Variant], scenarios: Sequence[str], seeds: range) -> list[Row]:
    """Every variant but the bases, in every scenario."""
    rows = []
    for variant in variants:
        if variant.name == variant.base:
            continue
        for scenario in scenarios:
            mine, theirs = (
                [found[scenario, name, seed] for seed in seeds] for name in (variant.name, variant.base)
            )
            changes = {
                name: change([getattr(f, name) for f in mine], [getattr(f, name) for f in theirs])
                for name in ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "union")
            }
            (p50, p50_ci), (p99, p99_ci) = changes["tpot_p50_ms"], changes["tpot_p99_ms"]
            errors = [figures.share_error for figures in mine if figures.share_error is not None]
            rows.append(
                Row(
                    variant.group,
                    variant.name,
                    variant.base,
                    scenario,
                    RATE,
                    p50,
                    p99,
                    p50_ci,
                    p99_ci,
                    changes["ttft_p50_ms"][0],
                    changes["union"][0],
                    sum(errors) / len(errors) if errors else None,
                )
            )
    return rows


def merged(raw: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the values of `other`, mappings merged."""
    out = dict(raw)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out


def table(rows: Sequence[Row]) -> Table:
    """One row per variant: P50 and P99 with half their intervals in every scenario."""
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    out = Table(title=f"TPOT against the base, %, {RATE:g} requests/s (P50 ± / P99 ±)")
    for heading in ("part", "variant"):
        out.add_column(heading, no_wrap=True)
    for scenario in scenarios:
        out.add_column(scenario, justify="right", no_wrap=True)
    for variant in dict.fromkeys(row.variant for row in rows):
        mine = {row.scenario: row for row in rows if row.variant == variant}
        cells = [
            f"{row.tpot_p50_vs_base:+.1f} ± {row.p50_ci[1] - row.tpot_p50_vs_base:.1f} / "
            f"{row.tpot_p99_vs_base:+.1f} ± {row.p99_ci[1] - row.tpot_p99_vs_base:.1f}"
            for row in (mine[scenario] for scenario in scenarios)
        ]
        out.add_row(next(iter(mine.values())).group, variant, *cells)
    return out


def measured(
    variants: Sequence[Variant], seeds: range, quick: bool, jobs: int
) -> Iterator[tuple[Found, range]]:
    """After each seed: every variant in every scenario so far, and the seeds so far; on `jobs` processes."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    found: dict[tuple[str, str, int], Figures] = {}
    parts = [variants[first : first + TOGETHER] for first in range(0, len(variants), TOGETHER)]
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, context) as pool,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("runs", total=len(seeds) * len(NAMES) * len(parts))
        for seed in seeds:
            futures = [pool.submit(_run, name, seed, part, quick) for name in NAMES for part in parts]
            for future in concurrent.futures.as_completed(futures):
                found.update(future.result())
                bar.advance(task)
            yield found, seeds[: seed + 1]


def _run(
    name: str, seed: int, variants: Sequence[Variant], quick: bool
) -> dict[tuple[str, str, int], Figures]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    raw = yaml.safe_load((SCENARIOS / f"{name}.yaml").read_text(encoding="utf-8"))
    drawn: dict[str, Requests] = {}
    found = {}
    for variant in variants:
        arrivals_s, warmup_s = (20.0, 5.0) if quick else (ARRIVALS_S, WARMUP_S)
        scenario = dataclasses.replace(
            scenario_of(merged(raw, variant.scenario)), rate=RATE, duration_s=arrivals_s, warmup_s=warmup_s
        )
        key = repr(scenario.world)
        if key not in drawn:
            drawn[key] = requests_of(scenario, world_of(scenario, SCENARIOS), seed)
        found[name, variant.name, seed] = simulate(scenario, drawn[key], variant.policy, seed)
    return found


def main() -> None:
    """Entry point."""
    groups = sorted({variant.group for variant in VARIANTS if variant.group})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", choices=groups, help="only the variants of this part")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--quick", action="store_true", help="20 s of arrivals, one seed")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    variants = [v for v in VARIANTS if not arguments.group or v.group in ("", arguments.group)]
    bases = {variant.base for variant in variants if variant.group}
    variants = [variant for variant in variants if variant.group or variant.name in bases]
    seeds = range(1 if arguments.quick else arguments.seeds)
    rows: list[Row] = []
    for found, so_far in measured(variants, seeds, arguments.quick, len(os.sched_getaffinity(0))):
        rows = rows_of(found, variants, NAMES, so_far)
        if arguments.json:
            settings = {"seeds": len(so_far), "quick": arguments.quick}
            arguments.json.write_text(
                json.dumps(settings | {"rows": [asdict(row) for row in rows]}, indent=1)
            )
    shown = Console()
    (shown if shown.is_terminal else Console(width=PIPED_WIDTH)).print(table(rows))


if __name__ == "__main__":
    main()
