"""Pictures that need single requests: a profile and the counts that it was fitted on."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts
from eldr.calibration.kmeans import spherical_kmeans
from eldr.calibration.profile import Profile
from eldr.calibration.views import prefill_decode, projection, purity
from eldr.plots.profile_figures import NoInputError
from eldr.plots.style import COLOURS, MUTED, SEQUENTIAL, figure, mark
from eldr.signature.transform import transform_named, unit_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Float32Array = npt.NDArray[np.float32]

MAX_ROWS = 4_000
"""Pictures show a seeded sample of at most this many requests."""
NO_DOMAIN = "unlabelled"
_RESTARTS = 8


def signature_rows(profile: Profile, counts: Counts) -> tuple[Float32Array, npt.NDArray[np.int64]]:
    """Unit rows [rows, dimensions] of the requests that have one, and their numbers; a sample of more than MAX_ROWS.

    Raises NoInputError for counts of another model.
    """
    mine = (profile.fingerprint, profile.moe_layers, profile.experts, profile.top_k)
    theirs = (counts.fingerprint, counts.moe_layers, counts.experts, counts.top_k)
    for name, a, b in zip(("fingerprint", "moe_layers", "experts", "top_k"), mine, theirs, strict=True):
        if a != b:
            raise NoInputError(f"{name} differs: the profile has {a!r}, the counts {b!r}")
    chosen = np.arange(counts.requests)
    if counts.requests > MAX_ROWS:
        rng = np.random.default_rng(profile.provenance.seed)
        chosen = np.sort(rng.choice(chosen, MAX_ROWS, replace=False))
    weighted = transform_named(profile.transform).weigh(counts.prefill_counts[chosen], profile.idf)
    units = unit_rows(weighted, profile.layer_mask)
    return units.rows[units.usable], chosen[units.usable]


def signature_map(profile: Profile, counts: Counts) -> "Figure":
    """First two principal components of the signatures by domain, with the centroids. Raises NoInputError."""
    rows, numbers = signature_rows(profile, counts)
    try:
        found = projection(rows, profile.centroids)
    except ValueError as error:
        raise NoInputError(str(error)) from error
    domains = [counts.domains[number] for number in numbers]
    labels = (rows @ profile.centroids.T).argmax(axis=1)
    if any(domains):
        title = (
            f"Signatures group by domain: for {purity(labels, domains):.0%} of the requests, their own domain "
            "is the largest at their nearest centroid"
        )
    else:
        title = (
            f"Two components hold {sum(found.explained):.0%} of the signatures' variance (no domain labels)"
        )
    made, axes = figure(title, (8.2, 5.6))
    named = np.array([domain or NO_DOMAIN for domain in domains])
    for number, domain in enumerate(sorted(set(named.tolist()))):
        chosen = found.rows[named == domain]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=16, alpha=0.65, linewidths=0, label=domain, **mark(number))
    axes.scatter(
        found.centroids[:, 0],
        found.centroids[:, 1],
        s=150,
        color="white",
        edgecolors="black",
        linewidths=1.2,
        zorder=3,
        label="centroid",
    )
    for cluster, (x, y) in enumerate(found.centroids):
        axes.text(x, y, str(cluster), ha="center", va="center", fontsize=7, zorder=4)
    axes.set_xlabel(f"principal component 1 ({found.explained[0]:.0%} of the variance)")
    axes.set_ylabel(f"principal component 2 ({found.explained[1]:.0%} of the variance)")
    from matplotlib.collections import PathCollection

    legend = made.legend(loc="outside right center", frameon=False, fontsize=8)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([36])
    return made


def cluster_sizes(profile: Profile, counts: Counts) -> "Figure":
    """Requests per cluster, balanced beside vanilla K-means on the same rows and seed. Raises NoInputError."""
    rows, _ = signature_rows(profile, counts)
    if len(rows) < profile.clusters:
        raise NoInputError(f"{len(rows)} usable requests for {profile.clusters} clusters")

    def sizes(balanced: bool) -> list[int]:
        found = spherical_kmeans(
            rows,
            profile.clusters,
            seed=profile.provenance.seed,
            restarts=_RESTARTS,
            balanced=balanced,
        )
        return sorted(found.sizes, reverse=True)

    # The profile's own sizes where they are those of these rows, so that the picture shows what is deployed.
    own = sorted(profile.clustering.sizes, reverse=True)
    usable = profile.clustering.balanced and sum(own) == len(rows)
    balanced, vanilla = own if usable else sizes(True), sizes(False)
    made, axes = figure(
        f"Balanced clusters hold {balanced[-1]} to {balanced[0]} requests, vanilla ones {vanilla[-1]} to {vanilla[0]} "
        f"({vanilla[0] * profile.clusters / len(rows):.1f} times the mean)"
    )
    place = np.arange(profile.clusters)
    axes.bar(place - 0.2, balanced, 0.4, color=COLOURS[0], label="balanced")
    axes.bar(place + 0.2, vanilla, 0.4, color=COLOURS[4], label="vanilla K-means")
    axes.axhline(len(rows) / profile.clusters, color="black", linewidth=1, linestyle="--", label="mean")
    if profile.clusters <= 32:
        axes.set_xticks(place, [str(rank + 1) for rank in place])
    axes.set_xlabel("cluster, from largest to smallest")
    axes.set_ylabel("requests of the calibration")
    axes.legend(frameon=False)
    return made


def prefill_against_decode(profile: Profile, counts: Counts) -> "Figure":
    """Density of decode against prefill share, one point per request, layer and expert. Raises NoInputError."""
    _, numbers = signature_rows(profile, counts)
    try:
        found = prefill_decode(counts.prefill_counts[numbers], counts.decode_counts[numbers])
    except ValueError as error:
        raise NoInputError(str(error)) from error
    low, high = np.quantile(found.correlations, [0.1, 0.9])
    made, axes = figure(
        f"Prefill predicts decode: correlation {found.correlations.mean():.2f} per expert "
        f"(10th to 90th percentile {low:.2f} to {high:.2f})",
        (6.8, 5.6),
    )
    x, y = 100 * found.prefill.ravel(), 100 * found.decode.ravel()
    touched = (x > 0) | (y > 0)
    most = 100.0 / profile.top_k
    drawn = axes.hexbin(
        x[touched], y[touched], gridsize=50, bins="log", cmap=SEQUENTIAL, mincnt=1, extent=(0, most, 0, most)
    )
    axes.plot([0, most], [0, most], color=COLOURS[1], linewidth=1.2, linestyle="--", label="decode = prefill")
    axes.set_xlabel("prefill: share of the layer's picks, %")
    axes.set_ylabel("decode: share of the layer's picks, %")
    axes.grid(color=MUTED, alpha=0.3)
    axes.set(xlim=(-0.02 * most, 1.02 * most), ylim=(-0.02 * most, 1.02 * most), aspect="equal")
    made.legend(loc="outside lower center", frameon=False)
    made.colorbar(drawn, ax=axes, label="triples of request, layer and expert per cell (log scale)")
    return made
