"""Pictures of simulated runs: TPOT per policy and rate, its distribution, experts per step, load over time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eldr.plots.style import COLOURS, figure, mark, panels, save
from eldr.simulator.measures import interval
from eldr.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = (10.0, 4.5)


def save_pictures(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Writes every picture as a PNG into `folder`, which is made where it is missing. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "tpot": tpot_by_policy(runs, title),
        "tpot-distribution": tpot_distribution(runs, title),
        "experts": experts_by_policy(runs, title),
        "load-skew": load_skew(runs, title),
    }
    return _saved(pictures, folder)


def save_rate_pictures(by_rate: Mapping[float, Sequence[Run]], folder: Path, title: str) -> list[Path]:
    """Writes the pictures over rates into `folder`, and those of each rate into a folder of its name there."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = _saved(
        {"tpot-by-rate": tpot_by_rate(by_rate, title), "experts-by-rate": experts_by_rate(by_rate, title)},
        folder,
    )
    for rate, runs in by_rate.items():
        paths += save_pictures(runs, folder / f"{rate:g}", f"{title}, {rate:g} requests/s")
    return paths


def tpot_by_rate(by_rate: Mapping[float, Sequence[Run]], title: str) -> "Figure":
    """Median and P99 against the rate, a line per policy; means over seeds with their 95 % interval."""
    made, both = panels(f"Time per output token by request rate: {title}", 2, _WIDE)
    for axes, heading, name in zip(both, ("P50", "P99"), ("tpot_p50_ms", "tpot_p99_ms"), strict=True):
        _lines(axes, by_rate, name)
        axes.set_title(heading, fontsize=10)
        axes.set_ylabel("time per output token (ms)")
    both[0].legend(fontsize=8)
    return made


def experts_by_rate(by_rate: Mapping[float, Sequence[Run]], title: str) -> "Figure":
    """Distinct experts of a step against the rate, a line per policy; means over seeds with their 95 % interval."""
    made, axes = figure(f"Distinct experts per layer and decode step by request rate: {title}")
    _lines(axes, by_rate, "union")
    axes.set_ylabel("experts per layer and step")
    axes.legend(fontsize=8)
    return made


def tpot_by_policy(runs: Sequence[Run], title: str) -> "Figure":
    """Median and P99 per policy, means over seeds with their 95 % interval."""
    names = _policies(runs)
    made, axes = figure(f"Time per output token by policy: {title}")
    for index, (label, name) in enumerate((("P50", "tpot_p50_ms"), ("P99", "tpot_p99_ms"))):
        found = [interval([getattr(run.figures, name) for run in runs if run.policy == p]) for p in names]
        heights, errors = zip(*found, strict=True)
        places = np.arange(len(names)) + 0.4 * index
        axes.bar(places, heights, 0.38, yerr=errors, label=label, color=COLOURS[index], capsize=3)
    axes.set_xticks(np.arange(len(names)) + 0.2, names, rotation=25, ha="right")
    axes.set_ylabel("time per output token (ms)")
    axes.legend()
    return made


def experts_by_policy(runs: Sequence[Run], title: str) -> "Figure":
    """Distinct experts per layer and step of each policy, means over seeds with their 95 % interval."""
    names = _policies(runs)
    made, axes = figure(f"Distinct experts per layer and decode step: {title}")
    found = [interval([run.figures.union for run in runs if run.policy == policy]) for policy in names]
    for place, (height, error) in enumerate(found):
        axes.barh(place, height, xerr=error, color=COLOURS[0], capsize=3)
        axes.annotate(
            f"{height:.1f}", (height + error, place), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("experts per layer and step, weighted by batch")
    return made


def tpot_distribution(runs: Sequence[Run], title: str) -> "Figure":
    """Share of requests below each TPOT, per policy; quantiles averaged over seeds."""
    made, axes = figure(f"Distribution of time per output token: {title}")
    for number, policy in enumerate(_policies(runs)):
        rows = [run.figures.tpot_quantiles_ms for run in runs if run.policy == policy]
        axes.plot(
            np.mean(rows, axis=0), np.arange(101), label=policy, markevery=10, markersize=4, **mark(number)
        )
    axes.set_xlabel("time per output token (ms)")
    axes.set_ylabel("requests below (%)")
    axes.legend()
    return made


def load_skew(runs: Sequence[Run], title: str) -> "Figure":
    """Largest load over mean load against time, of the first seed."""
    made, axes = figure(f"Most loaded decoder against the mean: {title}")
    for number, policy in enumerate(_policies(runs)):
        series = next(run.figures.skew_series for run in runs if run.policy == policy)
        if not series:
            continue
        times, skews = np.array(series).T
        axes.plot(
            times, skews, label=policy, markevery=max(1, len(times) // 12), markersize=4, **mark(number)
        )
    axes.set_xlabel("time (s)")
    axes.set_ylabel("largest load / mean load")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return made


def _lines(axes: "Axes", by_rate: Mapping[float, Sequence[Run]], name: str) -> None:
    rates = sorted(by_rate)
    names = _policies(by_rate[rates[0]])
    # Side by side, so that the intervals of equal policies do not hide each other.
    apart = 0.01 * (rates[-1] - rates[0])
    for number, policy in enumerate(names):
        places = [rate + apart * (number - (len(names) - 1) / 2) for rate in rates]
        found = [
            interval([getattr(run.figures, name) for run in by_rate[rate] if run.policy == policy])
            for rate in rates
        ]
        means, errors = zip(*found, strict=True)
        axes.errorbar(places, means, yerr=errors, label=policy, markersize=5, capsize=2, **mark(number))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xlabel("requests/s")


def _saved(pictures: "Mapping[str, Figure]", folder: Path) -> list[Path]:
    paths = []
    for name, picture in pictures.items():
        paths.append(folder / f"{name}.png")
        save(picture, paths[-1])
    return paths


def _policies(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))
