"""`eldr refit`: an old profile for another fleet or newer traffic."""

import datetime
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console

from eldr.calibration.atomic_file import files_sha256
from eldr.calibration.counts import CountsError
from eldr.calibration.counts_file import load_merged
from eldr.calibration.profile import Profile, ProfileError
from eldr.calibration.profile_refit import ProfileRefit, ProfileRefitSettings, refit_profile
from eldr.calibration.refit import RefitError
from eldr.cli.main import effective


@click.command(name="refit")
@click.argument(
    "profile_path", metavar="PROFILE", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--counts",
    "counts_paths",
    multiple=True,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Counts file to cluster: the calibration's, or newer traffic's. Repeat it for several.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Profile file to write; may be PROFILE itself, which is replaced in one step.",
)
@click.option("--clusters", "-k", type=int, help="Centroids, as a rule one per decoder. Default: as before.")
@click.option("--update-idf", is_flag=True, help="Learn the transform's weights from the counts, too.")
@click.option("--balanced/--vanilla", default=True, show_default=True, help="Clusters of equal size, or not.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal profiles.")
@click.option(
    "--restarts", type=int, default=8, show_default=True, help="Clusterings tried where --clusters changes."
)
@click.pass_context
def command(
    ctx: click.Context,
    profile_path: Path,
    counts_paths: tuple[Path, ...],
    out: Path,
    clusters: int | None,
    update_idf: bool,
    balanced: bool,
    seed: int,
    restarts: int,
) -> None:
    """Cluster counts anew in the space of PROFILE: same transform, same layers, the weights as they were.

    Decoders keep their centroids as far as they can. Also says how far the counts had drifted from PROFILE.
    """
    console = Console(soft_wrap=True, markup=False, highlight=False)
    for name, value in effective(ctx).items():
        console.print(f"{name} = {value}", style="dim")
    try:
        profile = Profile.load(profile_path)
        settings = ProfileRefitSettings(
            clusters=profile.clusters if clusters is None else clusters,
            update_idf=update_idf,
            balanced=balanced,
            restarts=restarts,
            seed=seed,
        )
        result = refit_profile(
            profile,
            load_merged(counts_paths),
            settings,
            counts_sha256=files_sha256(counts_paths),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            eldr_version=version("eldr"),
        )
        result.profile.save(out)
    except (CountsError, RefitError, ProfileError, OSError) as error:
        raise click.ClickException(str(error)) from error
    _report(console, profile, result)
    console.print(f"wrote {out} ({out.stat().st_size} bytes)")


def _report(console: Console, old: Profile, result: ProfileRefit) -> None:
    found = result.drift
    if found is None:
        console.print(f"drift from the old profile: unknown, {result.drift_unknown}")
    else:
        console.print(f"drift from the old profile: {found.advice}")
        rho = "unknown" if found.rho is None else f"{found.rho:.4f}"
        console.print(
            f"  outside {found.outside:.3f}, distance gap {found.distance_ks:.3f}, "
            f"occupancy {found.occupancy_tv:.3f}, rho {rho}"
        )
    new = result.profile.clustering
    start = "from the old centroids" if result.warm else "anew, matched with the old centroids"
    console.print(
        f"clusters: {len(old.clustering.sizes)} before, {len(new.sizes)} now, {start}; "
        f"sizes {min(new.sizes)} to {max(new.sizes)}, mean cosine {new.objective:.4f}"
    )
    for warning in result.profile.warnings:
        console.print(f"warning: {warning}", style="yellow")
