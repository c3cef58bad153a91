"""What a profile says, as plain values: for `eldr inspect` and for machines that read its JSON."""

import dataclasses
from typing import Any

from eldr.calibration.artifact import FORMAT_VERSION
from eldr.calibration.fit_record import TransformQuality
from eldr.calibration.profile import Profile


def chosen_quality(profile: Profile) -> TransformQuality | None:
    """The figures of the profile's own transform, None where the fit had too few requests to judge."""
    return next((quality for quality in profile.quality if quality.transform == profile.transform), None)


def held_out_rho(profile: Profile) -> float | None:
    """rho of the profile's transform over the layers it keeps, on held-out requests; None where unknown."""
    quality = chosen_quality(profile)
    if quality is None:
        return None
    masked = len(profile.layer_mask) < len(profile.moe_layers)
    return quality.held_out_mask_rho if masked else quality.held_out_rho


def summary(profile: Profile) -> dict[str, Any]:
    """The profile without its arrays, of JSON types only.

    `rho.gain_over` has, per other transform, how much better the profile's held-out rho is than that transform's
    best; `rho.gain_of_mask` how much better it is than with all layers.
    """
    return {
        "format_version": FORMAT_VERSION,
        "geometry": {
            "fingerprint": profile.fingerprint,
            "moe_layers": list(profile.moe_layers),
            "experts": profile.experts,
            "top_k": profile.top_k,
        },
        "transform": profile.transform,
        "mask": {
            "positions": list(profile.layer_mask),
            "layers": [profile.moe_layers[position] for position in profile.layer_mask],
            "dimensions": int(profile.centroids.shape[1]),
        },
        "clusters": {"count": profile.clusters, **_plain(profile.clustering)},
        "rho": _rho(profile),
        "transforms": [_plain(quality) for quality in profile.quality],
        "provenance": _plain(profile.provenance),
        "warnings": list(profile.warnings),
    }


def _rho(profile: Profile) -> dict[str, Any] | None:
    quality, held_out = chosen_quality(profile), held_out_rho(profile)
    if quality is None or held_out is None:
        return None
    others = {
        other.transform: held_out - other.best_held_out_rho
        for other in profile.quality
        if other.transform != profile.transform
    }
    return {
        "all_requests": quality.rho,
        "held_out": held_out,
        "gain_of_mask": held_out - quality.held_out_rho,
        "gain_over": others,
    }


def _plain(record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = dataclasses.asdict(record)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
