"""One look for every picture: size, colours that colour-blind readers tell apart, and the way to a file."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eldr.calibration.atomic_file import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's palette; blue for what is ours, vermilion for what it is compared with."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""A second cue beside the colour."""
MUTED = "#B0B0B0"
SEQUENTIAL = "cividis"
"""Colour map for quantities: uniform in lightness, safe for colour-blind readers."""

_SIZE_INCHES = (7.2, 4.5)
_DPI = 160
_TITLE_LETTERS_PER_INCH = 11


class MissingMatplotlibError(RuntimeError):
    """Pictures are asked for where matplotlib is not installed."""


def figure(title: str, size_inches: tuple[float, float] = _SIZE_INCHES) -> "tuple[Figure, Axes]":
    """A figure with one plain axes; `title` says the finding. Touches no state of pyplot.

    Raises MissingMatplotlibError that names the extra.
    """
    made, (axes,) = panels(title, 1, size_inches)
    return made, axes


def panels(
    title: str, count: int, size_inches: tuple[float, float] = _SIZE_INCHES
) -> "tuple[Figure, tuple[Axes, ...]]":
    """A figure with `count` plain axes side by side, each on its own scale; otherwise as `figure`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingMatplotlibError("pictures need matplotlib: pip install 'eldr[plots]'") from error
    made = Figure(figsize=size_inches, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(made)
    wrapped = textwrap.fill(title, int(_TITLE_LETTERS_PER_INCH * size_inches[0]))
    made.suptitle(wrapped, x=0.01, ha="left", fontsize=11, fontweight="bold")
    found = tuple(made.add_subplot(1, count, 1 + number) for number in range(count))
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return made, found


def mark(number: int) -> dict[str, Any]:
    """Colour and marker of series `number`; the first 64 differ from each other."""
    turn, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "marker": MARKERS[(colour + turn) % len(MARKERS)]}


def save(made: "Figure", path: Path) -> None:
    """Writes a PNG in one step; equal figures give equal bytes. Raises OSError."""
    write_atomically(path, lambda file: made.savefig(file, format="png", metadata={"Software": None}))
