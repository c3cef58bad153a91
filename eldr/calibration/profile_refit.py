"""A profile for another number of decoders or for newer traffic, without choosing transform and layers anew."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from eldr.calibration.alignment import alignment
from eldr.calibration.counts import Counts
from eldr.calibration.drift import Drift, DriftError, baseline, drift, live_rho
from eldr.calibration.fit_record import ClusterRecord, Provenance
from eldr.calibration.kmeans import KMeansError, spherical_kmeans
from eldr.calibration.profile import Profile
from eldr.calibration.refit import Float32Array, RefitError
from eldr.signature.transform import transform_named, unit_rows


@dataclass(frozen=True, slots=True)
class ProfileRefitSettings:
    """`update_idf` learns the transform's weights anew; `balanced`, `restarts`, `seed` as in `FitSettings`."""

    clusters: int
    update_idf: bool = False
    balanced: bool = True
    restarts: int = 8
    max_iterations: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("clusters", 1, 4_096),
            ("restarts", 1, 1_000),
            ("max_iterations", 1, 10_000),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise RefitError(f"{name} must be {least} to {most}, got {value}")


@dataclass(frozen=True, slots=True)
class ProfileRefit:
    """The new profile; how the counts had drifted from the old one, or why that is not known; and how it began."""

    profile: Profile
    drift: Drift | None
    drift_unknown: str
    warm: bool


def refit_profile(
    profile: Profile,
    counts: Counts,
    settings: ProfileRefitSettings,
    *,
    counts_sha256: str,
    created: str,
    eldr_version: str,
) -> ProfileRefit:
    """Clusters `counts` in the profile's space; transform and mask stay, and the weights unless `update_idf`.

    With as many clusters as before the old centroids are the start, else there are restarts. Centroid i is the one
    that follows the old centroid i in an optimal matching, so that decoders keep their traffic; more clusters than
    before come after those, with fewer the unmatched old ones are left out.
    Raises RefitError for counts of another model, naming field and values, and for too few requests.
    """
    for name in ("fingerprint", "moe_layers", "experts", "top_k"):
        mine, theirs = getattr(profile, name), getattr(counts, name)
        if mine != theirs:
            raise RefitError(f"{name} differs: the profile has {mine!r}, the counts have {theirs!r}")
    transform = transform_named(profile.transform)
    old_units = unit_rows(transform.weigh(counts.prefill_counts, profile.idf), profile.layer_mask)
    weights = transform.learn(counts.prefill_counts) if settings.update_idf else profile.idf
    units = (
        unit_rows(transform.weigh(counts.prefill_counts, weights), profile.layer_mask)
        if settings.update_idf
        else old_units
    )
    rows = units.rows[units.usable]
    warm = settings.clusters == profile.clusters
    try:
        found = spherical_kmeans(
            rows,
            settings.clusters,
            seed=settings.seed,
            restarts=settings.restarts,
            max_iterations=settings.max_iterations,
            balanced=settings.balanced,
            start=profile.centroids if warm else None,
        )
    except KMeansError as error:
        raise RefitError(f"cannot cluster: {error}") from error
    order = _order(found.centroids, profile.centroids)
    centroids = np.ascontiguousarray(found.centroids[order])
    kept = baseline(rows, centroids)
    measured, unknown = _measured(profile, counts, old_units.rows, old_units.usable)
    return ProfileRefit(
        profile=dataclasses.replace(
            profile,
            idf=weights.astype(np.float32),
            centroids=centroids,
            clustering=ClusterRecord(
                sizes=tuple(found.sizes[cluster] for cluster in order),
                balanced=settings.balanced,
                objective=found.objective,
                iterations=found.iterations,
                converged=found.converged,
                distinct_rows=found.distinct,
                distances=kept.distances,
                nearest=kept.nearest,
            ),
            provenance=Provenance(counts_sha256, counts.requests, created, eldr_version, settings.seed),
            warnings=_warnings(profile, settings, len(rows), counts.requests, found.distinct),
        ),
        drift=measured,
        drift_unknown=unknown,
        warm=warm,
    )


def _order(new: Float32Array, old: Float32Array) -> list[int]:
    """Numbers of the new centroids: those that follow an old one in the old order, then the others."""
    following = [int(cluster) for cluster in alignment(new, old) if cluster >= 0]
    return following + [cluster for cluster in range(len(new)) if cluster not in set(following)]


def _measured(
    profile: Profile, counts: Counts, rows: Float32Array, usable: "np.typing.NDArray[np.bool_]"
) -> tuple[Drift | None, str]:
    try:
        measured = drift(rows[usable], profile.centroids, profile.clustering)
    except DriftError as error:
        return None, str(error)
    decoded = np.flatnonzero(usable & (counts.decode_tokens > 0))
    try:
        rho = live_rho(rows[decoded], counts.decode_counts[decoded])
    except DriftError:  # too few of them decoded: the other measures stand
        return measured, ""
    return dataclasses.replace(measured, rho=rho), ""


def _warnings(
    profile: Profile, settings: ProfileRefitSettings, rows: int, requests: int, distinct: int
) -> tuple[str, ...]:
    space = "weights learned anew" if settings.update_idf else "weights kept"
    first = f"refitted on {requests} requests, {space}; the quality figures are those of the first fit"
    out = [first, *(warning for warning in profile.warnings if not warning.startswith("refitted on "))]
    if rows < requests:
        out.append(f"{requests - rows} requests have no signature and were not clustered")
    if distinct < settings.clusters:
        out.append(
            f"only {distinct} distinct signatures for {settings.clusters} clusters: some centroids are equal"
        )
    return tuple(out)
