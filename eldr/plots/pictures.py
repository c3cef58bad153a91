"""All pictures of a profile, into a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from eldr.calibration.counts import Counts
from eldr.calibration.profile import Profile
from eldr.plots.counts_figures import cluster_sizes, prefill_against_decode, signature_map
from eldr.plots.profile_figures import NoInputError, layer_idf, layer_rho, transform_rho
from eldr.plots.style import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDS_COUNTS = "needs the counts of the calibration (--counts)"

FROM_PROFILE: Mapping[str, "Callable[[Profile], Figure]"] = MappingProxyType(
    {"rho-per-transform": transform_rho, "rho-per-layers": layer_rho, "idf-per-layer": layer_idf}
)
FROM_COUNTS: Mapping[str, "Callable[[Profile, Counts], Figure]"] = MappingProxyType(
    {
        "signature-pca": signature_map,
        "cluster-sizes": cluster_sizes,
        "prefill-decode": prefill_against_decode,
    }
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that was written to `path`, or the reason why it was `skipped`."""

    name: str
    path: Path | None = None
    skipped: str = ""


def write_pictures(profile: Profile, counts: Counts | None, folder: Path) -> list[Picture]:
    """Writes NAME.png for every picture whose input is there. Raises MissingMatplotlibError, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write(name, folder, partial(draw, profile)) for name, draw in FROM_PROFILE.items()]
    for name, from_counts in FROM_COUNTS.items():
        if counts is None:
            written.append(Picture(name, skipped=NEEDS_COUNTS))
        else:
            written.append(_write(name, folder, partial(from_counts, profile, counts)))
    return written


def _write(name: str, folder: Path, draw: "Callable[[], Figure]") -> Picture:
    try:
        made = draw()
    except NoInputError as error:
        return Picture(name, skipped=str(error))
    path = folder / f"{name}.png"
    save(made, path)
    return Picture(name, path)
