"""`eldr fit`: counts in, profile out."""

import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from eldr.calibration.atomic_file import files_sha256
from eldr.calibration.counts import Counts, CountsError
from eldr.calibration.counts_file import load_merged
from eldr.calibration.fit import AUTO, FitError, FitResult, FitSettings, Progress, fit
from eldr.calibration.profile import Profile, ProfileError
from eldr.cli.main import effective
from eldr.signature.transform import TRANSFORMS


@click.command(name="fit")
@click.argument(
    "counts_paths",
    metavar="COUNTS...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--clusters", "-k", type=int, required=True, help="Centroids, as a rule one per decoder.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Profile file to write; an old one is replaced in one step.",
)
@click.option(
    "--transform",
    type=click.Choice([AUTO, *TRANSFORMS]),
    default=AUTO,
    show_default=True,
    help="How counts are weighed; auto takes the best on held-out requests.",
)
@click.option(
    "--mask",
    type=click.Choice(["auto", "all"]),
    default="auto",
    show_default=True,
    help="Layers that count: a greedy selection where it helps on held-out requests, or all.",
)
@click.option("--balanced/--vanilla", default=True, show_default=True, help="Clusters of equal size, or not.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal profiles.")
@click.option(
    "--restarts", type=int, default=8, show_default=True, help="Clusterings tried; the best is kept."
)
@click.option(
    "--max-iterations", type=int, default=50, show_default=True, help="Steps per clustering, at most."
)
@click.option("--held-out", type=float, default=0.3, show_default=True, help="Share of requests that judge.")
@click.option("--pairs", type=int, default=30_000, show_default=True, help="Request pairs per rho, at most.")
@click.option(
    "--weights",
    callback=lambda _context, _option, value: _weights(value),
    help="Relative cluster sizes, e.g. 2,1,1 for a first decoder that is twice as fast.  [default: equal]",
)
@click.option("--min-size", type=int, help="Fewest requests of a cluster, instead of equal sizes.")
@click.option("--max-size", type=int, help="Most requests of a cluster, instead of equal sizes.")
@click.option(
    "--max-requests",
    type=int,
    default=20_000,
    show_default=True,
    help="Requests that are clustered, at most.",
)
@click.pass_context
def command(
    ctx: click.Context, /, counts_paths: tuple[Path, ...], out: Path, mask: str, **options: Any
) -> None:
    """Turn the recorded COUNTS of a calibration into a profile; several files count as one.

    Prints rho (how well signature distances predict decode distances, Spearman) per transform, what was
    chosen and by how much, and the clusters.
    """
    console = Console()
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim", markup=False, highlight=False)
    try:
        settings = FitSettings(select_layers=mask == "auto", **options)
        counts = load_merged(counts_paths)
        result = _fit(counts, settings, files_sha256(counts_paths))
        result.profile.save(out)
    except (CountsError, FitError, ProfileError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _report(console, counts, result)
    console.print(f"wrote {out} ({out.stat().st_size} bytes)", markup=False, highlight=False)


def _weights(value: str | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        return tuple(float(word) for word in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"numbers separated by commas are wanted, got {value!r}") from error


def _fit(counts: Counts, settings: FitSettings, sha256: str) -> FitResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {stage: bar.add_task(stage, total=None) for stage in ("transforms", "clusters")}

        def show(progress: Progress) -> None:
            bar.update(tasks[progress.stage], completed=progress.done, total=progress.total)

        return fit(
            counts,
            settings,
            counts_sha256=sha256,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            eldr_version=version("eldr"),
            progress=show,
        )


def _report(console: Console, counts: Counts, result: FitResult) -> None:
    profile = result.profile
    console.print(
        f"{counts.requests} requests, {counts.layers} MoE layers x {counts.experts} experts, "
        f"top-{counts.top_k}, fingerprint {counts.fingerprint or 'unknown'}",
        markup=False,
        highlight=False,
    )
    if profile.quality:
        console.print(_quality_table(profile))
    console.print(f"chosen: {result.choice}", markup=False, highlight=False, soft_wrap=True)
    if len(profile.layer_mask) < len(profile.moe_layers):
        kept = ", ".join(str(profile.moe_layers[position]) for position in profile.layer_mask)
        console.print(f"layers kept: {kept}", markup=False, highlight=False)
    console.print(_cluster_table(counts, result))
    clustering = profile.clustering
    console.print(
        f"mean cosine to the own centroid {clustering.objective:.4f}, {clustering.iterations} iterations",
        highlight=False,
    )
    for warning in profile.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def _quality_table(profile: Profile) -> Table:
    table = Table(title="rho: signature distance against decode distance", box=SIMPLE)
    table.add_column("transform", no_wrap=True)
    for heading in ("all", "held out", "with mask", "layers"):
        table.add_column(heading, justify="right")
    for quality in profile.quality:
        selected = bool(quality.order)
        table.add_row(
            ("* " if quality.transform == profile.transform else "  ") + quality.transform,
            f"{quality.rho:.4f}",
            f"{quality.held_out_rho:.4f}",
            f"{quality.held_out_mask_rho:.4f}" if selected else "-",
            str(len(quality.mask)) if selected else "-",
        )
    return table


def _cluster_table(counts: Counts, result: FitResult) -> Table:
    table = Table(title="clusters", box=SIMPLE)
    table.add_column("cluster", justify="right")
    table.add_column("requests", justify="right")
    labelled = any(counts.domains)
    if labelled:
        table.add_column("domains")
    for cluster, size in enumerate(result.profile.clustering.sizes):
        row = [str(cluster), str(size)]
        if labelled:
            row.append(_domains(counts, result, cluster))
        table.add_row(*row)
    return table


def _domains(counts: Counts, result: FitResult, cluster: int) -> str:
    tally: dict[str, int] = {}
    for domain, label in zip(counts.domains, result.labels, strict=True):
        if label == cluster:
            tally[domain or "(none)"] = tally.get(domain or "(none)", 0) + 1
    ranked = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    more = f", {len(ranked) - 5} more" if len(ranked) > 5 else ""
    return ", ".join(f"{domain} {size}" for domain, size in ranked[:5]) + more
