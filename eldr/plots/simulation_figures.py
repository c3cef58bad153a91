"""Pictures of simulated runs: TPOT per policy, its distribution, load over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eldr.plots.style import COLOURS, figure, mark, save
from eldr.simulator.measures import interval
from eldr.simulator.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_pictures(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """Writes every picture as a PNG into `folder`, which is made where it is missing. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "tpot": tpot_by_policy(runs, title),
        "tpot-distribution": tpot_distribution(runs, title),
        "load-skew": load_skew(runs, title),
    }
    paths = []
    for name, picture in pictures.items():
        paths.append(folder / f"{name}.png")
        save(picture, paths[-1])
    return paths


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
    axes.legend()
    return made


def _policies(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.policy for run in runs))
