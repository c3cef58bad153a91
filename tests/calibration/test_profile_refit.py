import dataclasses

import numpy as np
import pytest

from eldr.calibration.fit import FitSettings, fit
from eldr.calibration.profile import Profile
from eldr.calibration.profile_refit import ProfileRefitSettings, refit_profile
from eldr.calibration.refit import RefitError

MADE = {"counts_sha256": "abc", "created": "2026-01-01T00:00:00+00:00", "eldr_version": "1"}


@pytest.fixture
def fitted(make_counts):
    counts = make_counts(requests=80)
    settings = FitSettings(clusters=4, transform="count-smoothed-idf", select_layers=False)
    return counts, fit(counts, settings, **MADE).profile


def refitted(profile, counts, **changes):
    return refit_profile(
        profile, counts, ProfileRefitSettings(**changes), **(MADE | {"counts_sha256": "new"})
    )


def test_the_same_counts_and_number_of_clusters_change_no_centroid(fitted):
    counts, profile = fitted
    result = refitted(profile, counts, clusters=4)
    assert result.warm
    np.testing.assert_allclose(result.profile.centroids, profile.centroids, atol=1e-5)
    assert result.profile.clustering.sizes == profile.clustering.sizes
    assert result.profile.provenance.counts_sha256 == "new"
    assert result.drift is not None
    assert not result.drift.refit_pays
    assert result.drift.rho > 0.5


@pytest.mark.parametrize("clusters", [2, 7])
def test_another_number_of_decoders_keeps_the_space_and_the_order(fitted, clusters):
    counts, profile = fitted
    result = refitted(profile, counts, clusters=clusters)
    new = result.profile
    assert not result.warm
    assert new.clusters == len(new.clustering.nearest) == clusters
    np.testing.assert_array_equal(new.idf, profile.idf)
    assert new.layer_mask == profile.layer_mask
    assert Profile.from_bytes(new.to_bytes()).clustering == new.clustering
    if clusters > 4:
        likeness = new.centroids[:4] @ profile.centroids.T
        swapped = new.centroids[[1, 0, 2, 3]] @ profile.centroids.T
        assert np.trace(likeness) >= np.trace(swapped)


def test_the_weights_are_kept_or_learned_as_asked(fitted, make_counts):
    _, profile = fitted
    newer = make_counts(requests=60, seed=5)
    assert np.array_equal(refitted(profile, newer, clusters=4).profile.idf, profile.idf)
    updated = refitted(profile, newer, clusters=4, update_idf=True)
    assert not np.array_equal(updated.profile.idf, profile.idf)
    assert "weights learned anew" in updated.profile.warnings[0]


def test_counts_that_drifted_are_said_to_have(fitted, make_counts):
    _, profile = fitted
    result = refitted(profile, make_counts(requests=60, seed=9), clusters=4)
    assert result.drift.refit_pays
    again = refitted(result.profile, make_counts(requests=60, seed=9), clusters=4)
    assert not again.drift.refit_pays
    assert len([w for w in again.profile.warnings if w.startswith("refitted on")]) == 1


def test_a_profile_without_distances_is_refitted_and_the_drift_unknown(fitted):
    counts, profile = fitted
    old = dataclasses.replace(
        profile, clustering=dataclasses.replace(profile.clustering, distances=(), nearest=())
    )
    result = refitted(old, counts, clusters=4)
    assert result.drift is None
    assert "fit it again" in result.drift_unknown
    assert len(result.profile.clustering.distances) == 101


@pytest.mark.parametrize("changes", [{"fingerprint": "model-b"}, {"moe_layers": (0, 1, 3)}])
def test_counts_of_another_model_are_refused_with_both_values(fitted, make_counts, changes):
    _, profile = fitted
    with pytest.raises(RefitError, match=f"{next(iter(changes))} differs: the profile has"):
        refitted(profile, make_counts(**changes), clusters=4)


def test_fewer_requests_than_clusters_are_refused(fitted, make_counts):
    _, profile = fitted
    with pytest.raises(RefitError, match="cannot cluster"):
        refitted(profile, make_counts(requests=8), clusters=9)


@pytest.mark.parametrize("name", ["clusters", "restarts", "max_iterations"])
def test_settings_out_of_range_are_refused_by_name(name):
    with pytest.raises(RefitError, match=f"{name} must be 1 to"):
        ProfileRefitSettings(**({"clusters": 4} | {name: 0}))
