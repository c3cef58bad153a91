"""`eldr inspect`: what a profile holds, in words, as JSON, and in pictures."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from eldr.calibration.counts import CountsError
from eldr.calibration.counts_file import load_merged
from eldr.calibration.profile import Profile, ProfileError
from eldr.calibration.summary import summary
from eldr.cli.calls import ask
from eldr.cli.main import effective
from eldr.client import DriftStatus, ProfileStatus, RouterClient
from eldr.plots.pictures import write_pictures
from eldr.plots.style import MissingMatplotlibError


@click.command(name="inspect")
@click.argument(
    "profile_path", metavar="PROFILE", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--json", "as_json", is_flag=True, help="Print the same for machines, and nothing else.")
@click.option(
    "--plots",
    "plots_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures (PNG) into this folder; needs eldr[plots].",
)
@click.option(
    "--counts",
    "counts_paths",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Counts file of the calibration, for the pictures of single requests; may be repeated.",
)
@click.option(
    "--live",
    metavar="HOST:PORT",
    help="Router whose live traffic is compared with the profile, which it must have loaded.",
)
@click.pass_context
def command(
    ctx: click.Context,
    profile_path: Path,
    as_json: bool,
    plots_dir: Path | None,
    counts_paths: tuple[Path, ...],
    live: str | None,
) -> None:
    """Show a profile: geometry, transform, layers, clusters, rho, provenance, warnings."""
    if counts_paths and plots_dir is None:
        raise click.UsageError("--counts is read for pictures only: add --plots DIR")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    try:
        profile = Profile.load(profile_path)
        found = summary(profile)
        if plots_dir is not None:
            found["pictures"] = _pictures(profile, counts_paths, plots_dir)
        if live is not None:
            found["live"] = _live(profile, live)
    except (ProfileError, CountsError, MissingMatplotlibError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim")
    _report(console, found)


def _pictures(profile: Profile, counts_paths: tuple[Path, ...], folder: Path) -> list[dict[str, Any]]:
    counts = load_merged(counts_paths) if counts_paths else None
    return [
        {
            "name": picture.name,
            "path": str(picture.path) if picture.path else None,
            "skipped": picture.skipped,
        }
        for picture in write_pictures(profile, counts, folder)
    ]


def _live(profile: Profile, router: str) -> dict[str, Any]:
    async def read(client: RouterClient) -> tuple[ProfileStatus, DriftStatus]:
        served = [
            status.info.served_model
            for status in await client.workers()
            if status.info.geometry.fingerprint == profile.fingerprint
        ]
        model = min(served, default="")
        return await client.get_profile(model), await client.get_drift(model)

    theirs, drift = ask(router, read)
    mine = dataclasses.asdict(profile.provenance)
    if not theirs.loaded:
        raise click.ClickException(f"router {router} has no profile: `eldr router --profile` loads one")
    if theirs.fingerprint != profile.fingerprint or dict(theirs.provenance) != mine:
        raise click.ClickException(
            f"router {router} has another profile: fingerprint {theirs.fingerprint!r}, {dict(theirs.provenance)}; "
            f"this one: fingerprint {profile.fingerprint!r}, {mine}"
        )
    return dataclasses.asdict(drift)


def _report(console: Console, found: dict[str, Any]) -> None:
    geometry, mask, origin = found["geometry"], found["mask"], found["provenance"]
    layers = len(geometry["moe_layers"])
    console.print(
        f"model: {layers} MoE layers x {geometry['experts']} experts, top-{geometry['top_k']}, "
        f"fingerprint {geometry['fingerprint'] or 'unknown'}"
    )
    console.print(
        f"signature: {found['transform']} on {len(mask['layers'])} of {layers} layers "
        f"({', '.join(map(str, mask['layers']))}), {mask['dimensions']} dimensions"
    )
    _report_rho(console, found)
    _report_clusters(console, found["clusters"])
    console.print(
        f"made: {origin['created']} by eldr {origin['eldr_version']}, {origin['requests']} requests, "
        f"seed {origin['seed']}, counts sha256 {origin['counts_sha256']}"
    )
    if "live" in found:
        _report_live(console, found["live"])
    for picture in found.get("pictures", ()):
        console.print(
            f"wrote {picture['path']}"
            if picture["path"]
            else f"skipped {picture['name']}: {picture['skipped']}"
        )
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", style="yellow")


def _report_live(console: Console, live: dict[str, Any]) -> None:
    if not live["measured"]:
        console.print(f"live: not measured, {live['reason']}")
        return
    console.print(f"live: {live['reason']}", style="yellow" if live["refit_pays"] else None)
    rho = "unknown here, a router hears no decode counts" if live["rho"] is None else f"{live['rho']:.4f}"
    console.print(
        f"live: {live['signatures']} signatures, {live['age_s']:.0f} s ago; outside {live['outside_ratio']:.3f}, "
        f"median distance {live['distance_median']:.4f} against {live['calibration_distance_median']:.4f} "
        f"(gap {live['distance_ks']:.3f}), occupancy off by {live['occupancy_tv']:.3f}; rho {rho}"
    )


def _report_rho(console: Console, found: dict[str, Any]) -> None:
    rho = found["rho"]
    if rho is None:
        console.print("rho: unknown, too few requests had decode counts")
        return
    gains = "".join(f", {gain:+.4f} against {name}" for name, gain in _nearest_rival(rho["gain_over"]))
    console.print(
        f"rho: {rho['held_out']:.4f} on held-out requests ({rho['all_requests']:.4f} on all, all layers), "
        f"{rho['gain_of_mask']:+.4f} by the layer mask{gains}"
    )
    table = Table(title="rho per transform", box=SIMPLE)
    table.add_column("transform", no_wrap=True)
    for heading in ("all", "held out", "with mask", "layers"):
        table.add_column(heading, justify="right")
    for row in found["transforms"]:
        selected = bool(row["order"])
        table.add_row(
            ("* " if row["transform"] == found["transform"] else "  ") + row["transform"],
            f"{row['rho']:.4f}",
            f"{row['held_out_rho']:.4f}",
            f"{row['held_out_mask_rho']:.4f}" if selected else "-",
            str(len(row["mask"])) if selected else "-",
        )
    console.print(table)


def _nearest_rival(gains: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(gains.items(), key=lambda item: item[1])[:1]


def _report_clusters(console: Console, clusters: dict[str, Any]) -> None:
    sizes = clusters["sizes"]
    listed = ", ".join(map(str, sizes[:64])) + (f", {len(sizes) - 64} more" if len(sizes) > 64 else "")
    console.print(
        f"clusters: {clusters['count']}, {'balanced' if clusters['balanced'] else 'vanilla'}, "
        f"sizes {min(sizes)} to {max(sizes)}: {listed}"
    )
    ended = "converged" if clusters["converged"] else "stopped while moving"
    console.print(
        f"clustering: mean cosine to the own centroid {clusters['objective']:.4f}, {ended} after "
        f"{clusters['iterations']} iterations, {clusters['distinct_rows']} distinct signatures"
    )
