"""Pictures drawn from a profile alone."""

from typing import TYPE_CHECKING

import numpy as np

from eldr.calibration.profile import Profile
from eldr.calibration.summary import chosen_quality
from eldr.plots.style import COLOURS, MUTED, SEQUENTIAL, figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class NoInputError(ValueError):
    """A picture cannot be drawn from what is there; the message says what is missing."""


def transform_rho(profile: Profile) -> "Figure":
    """Bars of the held-out rho per transform: all layers, and the selected ones. Raises NoInputError."""
    if not profile.quality:
        raise NoInputError("the fit had too few requests with decode counts to judge transforms")
    qualities = sorted(profile.quality, key=lambda quality: quality.best_held_out_rho)
    best, least = qualities[-1], qualities[0]
    if best.transform == profile.transform and len(qualities) > 1:
        title = (
            f"{best.transform} predicts decode best: rho {best.best_held_out_rho:.3f}, "
            f"{best.best_held_out_rho - qualities[-2].best_held_out_rho:.3f} above {qualities[-2].transform}"
        )
    else:
        title = f"rho of {best.transform} is {best.best_held_out_rho:.3f} on held-out requests"
    made, axes = figure(title)
    heights = np.arange(len(qualities))
    selected = np.array([bool(quality.order) for quality in qualities])
    rho = np.array([quality.held_out_rho for quality in qualities])
    masked = np.array([quality.held_out_mask_rho for quality in qualities])[selected]
    own = heights + np.where(selected, 0.2, 0.0)
    axes.barh(own, rho, 0.38, color=COLOURS[0], label="all layers")
    if selected.any():
        axes.barh(heights[selected] - 0.2, masked, 0.38, color=COLOURS[4], label="selected layers")
    places, values = np.append(own, heights[selected] - 0.2), np.append(rho, masked)
    for place, value in zip(places, values, strict=True):
        axes.text(max(value, 0.0) + 0.006, place, f"{value:.3f}", va="center", fontsize=8)
    axes.set_yticks(heights, [quality.transform for quality in qualities])
    for label, quality in zip(axes.get_yticklabels(), qualities, strict=True):
        label.set_fontweight("bold" if quality.transform == profile.transform else "normal")
    axes.set_xlim(min(0.0, least.held_out_rho), max(0.1, best.best_held_out_rho) * 1.12)
    axes.set_xlabel("rho on held-out requests, no unit (bold: the profile's transform)")
    made.legend(loc="outside lower center", ncols=2, frameon=False)
    return made


def layer_rho(profile: Profile) -> "Figure":
    """rho against the number of layers kept, greedy order, peak marked. Raises NoInputError."""
    curves = [quality for quality in profile.quality if quality.curve]
    if not curves:
        raise NoInputError("the fit selected no layers (--mask all, or too few requests)")
    shown = chosen_quality(profile)
    if shown is None or not shown.curve:
        shown = max(curves, key=lambda quality: quality.best_held_out_rho)
    peak, layers = len(shown.mask), len(shown.curve)
    gain = shown.held_out_mask_rho - shown.held_out_rho
    masked = len(profile.layer_mask) < len(profile.moe_layers)
    verdict = "the others are left out" if masked else "but all are kept"
    made, axes = figure(
        f"{shown.transform}: rho peaks at {peak} of {layers} layers, {verdict}: "
        f"the selection changes held-out rho by {gain:+.4f}"
    )
    steps = np.arange(1, layers + 1)
    styles = iter(((0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1))))
    for quality in curves:
        if quality is not shown:
            axes.plot(
                np.arange(1, len(quality.curve) + 1),
                quality.curve,
                color="#707070",
                linewidth=1.2,
                linestyle=next(styles, "-"),
                label=quality.transform,
            )
    axes.plot(
        steps,
        shown.curve,
        color=COLOURS[0],
        linewidth=2.2,
        marker="o" if layers <= 16 else None,
        label=shown.transform,
    )
    top = shown.curve[peak - 1]
    axes.plot(
        [peak],
        [top],
        marker="*",
        markersize=16,
        color=COLOURS[1],
        linestyle="none",
        label=f"peak, rho {top:.4f}",
    )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("MoE layers kept, best first (greedy)")
    axes.set_ylabel("rho on the requests that chose the layers, no unit")
    axes.grid(axis="y", color=MUTED, alpha=0.4)
    axes.legend(loc="lower right", frameon=False)
    return made


def layer_idf(profile: Profile) -> "Figure":
    """Heat map of the learned weights, experts sorted within each layer. Raises NoInputError."""
    if np.ptp(profile.idf) == 0:
        raise NoInputError(f"transform {profile.transform} learns no weights")
    ordered = -np.sort(-profile.idf, axis=1)
    spread = np.ptp(ordered, axis=1)
    made, axes = figure(
        f"{profile.transform}: weights run from {ordered.min():.2f} to {ordered.max():.2f}; "
        f"layer {profile.moe_layers[int(spread.argmax())]} varies most"
    )
    image = axes.imshow(ordered, aspect="auto", cmap=SEQUENTIAL, interpolation="nearest")
    layers = len(profile.moe_layers)
    ticks = np.unique(np.linspace(0, layers - 1, min(layers, 16)).round().astype(int))
    kept = set(profile.layer_mask)
    axes.set_yticks(
        ticks, [f"{profile.moe_layers[tick]}{'' if tick in kept else ' (not kept)'}" for tick in ticks]
    )
    axes.set_xlabel("experts of the layer, from rarest to most common")
    axes.set_ylabel("MoE layer (model index)")
    made.colorbar(image, ax=axes, label="weight (no unit; higher: fewer requests use it)")
    return made
