"""From counts to a profile: choose transform and layers by held-out rho, then cluster."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.calibration.choice import Choice, choose
from eldr.calibration.counts import Counts
from eldr.calibration.drift import baseline
from eldr.calibration.fit_record import ClusterRecord, Provenance
from eldr.calibration.kmeans import KMeansError, spherical_kmeans
from eldr.calibration.profile import Profile
from eldr.signature.transform import TRANSFORMS, TransformError, transform_named, unit_rows

IntArray = npt.NDArray[np.int64]

AUTO = "auto"
MIN_REQUESTS = 20
"""Fewest requests with decode counts from which a transform or a mask is chosen."""


class FitError(ValueError):
    """Settings out of range, or counts that cannot be fitted as asked."""


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How to fit. `transform` is a name or "auto"; `select_layers` chooses a layer mask, else all count.

    `pairs` bounds the request pairs that a rho is computed from, `held_out` is the share of requests that
    judge the choice, `max_requests` the largest number that is clustered (a seeded sample of more). `weights` are
    the clusters' relative sizes, `min_size` and `max_size` bounds instead.
    Raises FitError naming field, value and range.
    """

    clusters: int
    transform: str = AUTO
    select_layers: bool = True
    balanced: bool = True
    seed: int = 0
    restarts: int = 8
    max_iterations: int = 50
    held_out: float = 0.3
    pairs: int = 30_000
    max_requests: int = 20_000
    weights: tuple[float, ...] | None = None
    min_size: int | None = None
    max_size: int | None = None

    def __post_init__(self) -> None:
        if self.transform != AUTO:
            try:
                transform_named(self.transform)
            except TransformError as error:
                raise FitError(f"{error}; or auto") from error
        if not 0.1 <= self.held_out <= 0.5:
            raise FitError(f"held_out must be 0.1 to 0.5, got {self.held_out}")
        for name, least, most in (
            ("clusters", 1, 4_096),
            ("seed", 0, 2**32 - 1),
            ("restarts", 1, 1_000),
            ("max_iterations", 1, 10_000),
            ("pairs", 100, 10_000_000),
            ("max_requests", 1, 1_000_000),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise FitError(f"{name} must be {least} to {most}, got {value}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one stage of a fit is."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """`labels` int64 [requests] is each request's cluster, -1 where it was not clustered; `choice` is a sentence."""

    profile: Profile
    labels: IntArray
    choice: str


def fit(
    counts: Counts,
    settings: FitSettings,
    *,
    counts_sha256: str,
    created: str,
    eldr_version: str,
    progress: Callable[[Progress], None] = lambda _: None,
) -> FitResult:
    """Fits a profile; equal arguments give equal results.

    The weights of the chosen transform are learned anew on all requests. Requests whose signature has no norm
    are left out of the clustering and named in the profile's warnings.
    Raises FitError where there are too few requests for the choice or for the clusters.
    """
    warnings: list[str] = []
    if not counts.fingerprint:
        warnings.append("the counts carry no model fingerprint: no live model will accept this profile")
    choice = _choice(counts, settings, progress, warnings)
    transform = transform_named(choice.transform)
    weights = transform.learn(counts.prefill_counts)
    units = unit_rows(transform.weigh(counts.prefill_counts, weights), choice.layers)
    unusable = np.flatnonzero(~units.usable)
    if unusable.size:
        named = ", ".join(counts.ids[row] for row in unusable[:5])
        warnings.append(f"{unusable.size} requests have no signature and were not clustered: {named}")
    rows = _sample(np.flatnonzero(units.usable), settings, warnings)
    try:
        clustering = spherical_kmeans(
            units.rows[rows],
            settings.clusters,
            seed=settings.seed,
            restarts=settings.restarts,
            max_iterations=settings.max_iterations,
            balanced=settings.balanced,
            weights=settings.weights,
            least=settings.min_size,
            most=settings.max_size,
            progress=lambda done: progress(Progress("clusters", done, settings.restarts)),
        )
    except KMeansError as error:
        raise FitError(f"cannot cluster: {error}") from error
    if clustering.distinct < settings.clusters:
        warnings.append(
            f"only {clustering.distinct} distinct signatures for {settings.clusters} clusters: "
            "some centroids are equal"
        )
    if not clustering.converged:
        warnings.append(f"the clusters still moved after {clustering.iterations} iterations")
    labels = np.full(counts.requests, -1, dtype=np.int64)
    labels[rows] = clustering.labels
    kept = baseline(units.rows[rows], clustering.centroids)
    profile = Profile(
        fingerprint=counts.fingerprint,
        moe_layers=counts.moe_layers,
        experts=counts.experts,
        top_k=counts.top_k,
        transform=transform.name,
        idf=weights.astype(np.float32),
        layer_mask=choice.layers,
        centroids=clustering.centroids,
        quality=choice.qualities,
        clustering=ClusterRecord(
            sizes=clustering.sizes,
            balanced=settings.balanced,
            objective=clustering.objective,
            iterations=clustering.iterations,
            converged=clustering.converged,
            distinct_rows=clustering.distinct,
            distances=kept.distances,
            nearest=kept.nearest,
        ),
        provenance=Provenance(counts_sha256, counts.requests, created, eldr_version, settings.seed),
        warnings=tuple(warnings),
    )
    return FitResult(profile, labels, choice.sentence)


def _choice(
    counts: Counts, settings: FitSettings, progress: Callable[[Progress], None], warnings: list[str]
) -> Choice:
    decoded = np.flatnonzero(counts.decode_tokens > 0)
    if len(decoded) < counts.requests:
        warnings.append(f"{counts.requests - len(decoded)} requests generated nothing and judge no transform")
    if len(decoded) < MIN_REQUESTS:
        if settings.transform == AUTO:
            raise FitError(
                f"transform auto needs at least {MIN_REQUESTS} requests with decode counts, got {len(decoded)}; "
                "name a transform"
            )
        warnings.append(
            f"fewer than {MIN_REQUESTS} requests with decode counts: quality unknown, all layers kept"
        )
        sentence = f"{settings.transform} on all layers, as asked; too few requests to judge it"
        return Choice(settings.transform, tuple(range(counts.layers)), (), sentence)
    names = tuple(TRANSFORMS) if settings.transform == AUTO else (settings.transform,)
    sums = {"gate_probability": counts.gate_probability, "gate_logit": counts.gate_logit}
    gates = {name: array[decoded] for name, array in sums.items() if array is not None}
    return choose(
        counts.prefill_counts[decoded],
        counts.decode_counts[decoded],
        names,
        gates=gates if settings.transform == AUTO else None,
        select=settings.select_layers,
        held_out=settings.held_out,
        max_pairs=settings.pairs,
        seed=settings.seed,
        progress=lambda done, total: progress(Progress("transforms", done, total)),
    )


def _sample(usable: IntArray, settings: FitSettings, warnings: list[str]) -> IntArray:
    if len(usable) < settings.clusters:
        raise FitError(f"clusters must be at most the {len(usable)} usable requests, got {settings.clusters}")
    if len(usable) <= settings.max_requests:
        return usable
    if settings.max_requests < settings.clusters:
        raise FitError(
            f"max_requests must be at least clusters, {settings.clusters}, got {settings.max_requests}"
        )
    warnings.append(f"clustered a sample of {settings.max_requests} of {len(usable)} requests")
    rng = np.random.default_rng(settings.seed)
    return np.sort(rng.choice(usable, settings.max_requests, replace=False))
