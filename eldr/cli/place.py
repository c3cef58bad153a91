"""`eldr place`: recorded counts in, a placement of experts on expert-parallel ranks out."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from eldr.calibration.atomic_file import write_atomically
from eldr.calibration.counts import Counts, CountsError
from eldr.calibration.counts_file import load_merged
from eldr.cli.main import effective
from eldr.placement import (
    DEFAULT_PLANNER,
    PLANNERS,
    REPLICA_CHOICES,
    Demand,
    Geometry,
    Map,
    PlacementError,
    PlanSettings,
    plan,
)
from eldr.placement.replay import Use, activated_of, even_split, use_by_hash, use_fewest_activated
from eldr.plots import style

Picks = npt.NDArray[np.int64]


@click.command(name="place")
@click.option(
    "--counts",
    "counts_paths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    required=True,
    help="Counts file of `eldr calibrate`; may be given several times.",
)
@click.option("--ranks", type=int, required=True, help="Expert-parallel ranks.")
@click.option("--slots", type=int, help="Expert slots of a layer on all ranks; default: one per expert.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes that share the ranks equally.")
@click.option(
    "--planner",
    type=click.Choice(list(PLANNERS)),
    default=DEFAULT_PLANNER,
    show_default=True,
    help="The rule.",
)
@click.option(
    "--replica-choice",
    type=click.Choice(REPLICA_CHOICES),
    default="fewest-activated",
    show_default=True,
    help="How a step picks among replicas, when the plan is measured.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a decode step."
)
@click.option(
    "--steps",
    type=click.IntRange(8),
    default=256,
    show_default=True,
    help="Steps to plan on, and as many to measure.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal plans.")
@click.option("--compare", is_flag=True, help="Measure every planner under both replica choices, too.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Heat map: activated experts by layer and rank.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file for the map.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    counts_paths: tuple[Path, ...],
    ranks: int,
    slots: int | None,
    nodes: int,
    planner: str,
    replica_choice: str,
    batch: int,
    steps: int,
    seed: int,
    compare: bool,
    plot: Path | None,
    out: Path | None,
) -> None:
    """Plan which expert lies in which slot of which rank.

    Steps are batches of tokens of random requests; the plan is made on one half of the requests and measured on
    the other. Prints for each layer the activated experts per rank, before (linear, no replicas) and after.
    """
    console = Console()
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    try:
        counts = load_merged(counts_paths)
        geometry = Geometry(counts.experts, ranks, counts.experts if slots is None else slots, nodes)
        planned, measured = drawn(counts, steps, batch, seed)
        demand = _demand(planned, counts.experts)
        result = plan(demand, geometry, PlanSettings(planner, seed=seed))
        plain = Geometry(counts.experts, ranks, -(-counts.experts // ranks) * ranks, nodes)
        before = _use(measured, plan(demand, plain, PlanSettings("linear")).maps, plain, replica_choice)
        after = _use(measured, result.maps, geometry, replica_choice)
        console.print(_layers_table(counts, before, after))
        if compare:
            console.print(_comparison(demand, measured, geometry, seed))
        even = even_split(activated_of(measured, counts.experts), ranks).mean()
        console.print(
            f"largest rank {before.largest.mean():.2f} -> {after.largest.mean():.2f} activated experts; "
            f"no placement is under {even:.2f}",
            highlight=False,
        )
        if out is not None:
            text = json.dumps(_document(counts, geometry, result.maps, planner, replica_choice), indent=1)
            write_atomically(out, lambda file: file.write(text.encode()))
            console.print(f"wrote {out}", markup=False, highlight=False)
        if plot is not None:
            _plot(counts, before, after, plot)
            console.print(f"wrote {plot}", markup=False, highlight=False)
    except (CountsError, PlacementError, style.MissingMatplotlibError, OSError) as error:
        raise click.ClickException(str(error)) from error


def drawn(counts: Counts, steps: int, batch: int, seed: int) -> tuple[Picks, Picks]:
    """Picks of steps to plan on and of steps to measure, [steps, batch, layers, top_k], of different requests.

    Where single decode steps are not known, a token's picks are drawn by its request's decode counts.
    Raises CountsError with fewer than two requests that generated anything.
    """
    rng = np.random.default_rng(seed)
    usable = rng.permutation(np.flatnonzero(counts.decode_tokens > 0))
    if usable.size < 2:
        raise CountsError(f"placement needs two requests with decode counts, the counts have {usable.size}")
    half = usable.size // 2
    first, second = (
        _steps(counts, part[rng.integers(part.size, size=(steps, batch))], rng)
        for part in (usable[:half], usable[half:])
    )
    return first, second


def _steps(counts: Counts, requests: Picks, rng: np.random.Generator) -> Picks:
    if counts.decode_ids is not None:
        at = (rng.random(requests.shape) * counts.decode_tokens[requests]).astype(np.int64)
        return np.asarray(counts.decode_ids[requests, at], dtype=np.int64)
    picks = []
    for row in requests:
        shares = counts.decode_counts[row].astype(np.float64)
        order = np.log(shares + 1e-9) + rng.gumbel(size=shares.shape)
        picks.append(np.argpartition(-order, counts.top_k - 1, axis=2)[:, :, : counts.top_k])
    return np.asarray(picks, dtype=np.int64)


def _demand(picks: Picks, experts: int) -> Demand:
    layers = picks.shape[2]
    tokens = np.stack([np.bincount(picks[:, :, layer].ravel(), minlength=experts) for layer in range(layers)])
    return Demand.of_steps(np.ascontiguousarray(activated_of(picks, experts).transpose(2, 0, 1)), tokens)


def _use(picks: Picks, maps: Map, geometry: Geometry, choice: str) -> Use:
    if choice == "hash":
        return use_by_hash(picks, maps, geometry)
    return use_fewest_activated(activated_of(picks, geometry.experts), maps, geometry)


def _layers_table(counts: Counts, before: Use, after: Use) -> Table:
    table = Table(title="activated experts per rank and step", box=SIMPLE)
    for heading in ("layer", "max before", "mean", "max/mean", "max after", "mean", "max/mean"):
        table.add_column(heading, justify="right")
    for row, layer in enumerate(counts.moe_layers):
        cells = [str(layer)]
        for use in (before, after):
            mean = float(use.per_rank[row].mean())
            largest = float(use.largest[row])
            cells += [f"{largest:.2f}", f"{mean:.2f}", f"{largest / mean:.3f}"]
        table.add_row(*cells)
    return table


def _comparison(demand: Demand, measured: Picks, geometry: Geometry, seed: int) -> Table:
    table = Table(title="largest rank, mean over steps and layers", box=SIMPLE)
    table.add_column("planner", no_wrap=True)
    for choice in REPLICA_CHOICES:
        table.add_column(choice, justify="right")
    for name in PLANNERS:
        maps = plan(demand, geometry, PlanSettings(name, seed=seed)).maps
        means = [_use(measured, maps, geometry, choice).largest.mean() for choice in REPLICA_CHOICES]
        table.add_row(name, *(f"{mean:.2f}" for mean in means))
    return table


def _document(counts: Counts, geometry: Geometry, maps: Map, planner: str, choice: str) -> dict[str, Any]:
    return {
        "eldr_placement_version": 1,
        "fingerprint": counts.fingerprint,
        "experts": geometry.experts,
        "ranks": geometry.ranks,
        "slots": geometry.slots,
        "nodes": geometry.nodes,
        "planner": planner,
        "replica_choice": choice,
        "physical_to_logical": {
            str(layer): row.tolist() for layer, row in zip(counts.moe_layers, maps, strict=True)
        },
    }


def _plot(counts: Counts, before: Use, after: Use, path: Path) -> None:
    first, second = (use.per_rank.mean(axis=2) for use in (before, after))
    gap = np.full((counts.layers, 1), np.nan)
    largest = f"{before.largest.mean():.2f} to {after.largest.mean():.2f}"
    picture, panel = style.figure(
        f"Largest rank from {largest} activated experts: linear (left), planned (right)"
    )
    image = panel.imshow(np.hstack([first, gap, second]), aspect="auto", interpolation="nearest")
    ranks = first.shape[1]
    panel.set(xlabel="rank", ylabel="MoE layer")
    panel.set_xticks([*range(ranks), *range(ranks + 1, 2 * ranks + 1)], [*range(ranks), *range(ranks)])
    panel.set_yticks(range(counts.layers), list(map(str, counts.moe_layers)))
    picture.colorbar(image, ax=panel, label="activated experts per step")
    style.save(picture, path)
