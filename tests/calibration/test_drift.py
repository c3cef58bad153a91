import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.calibration.drift import (
    MIN_ROWS,
    OCCUPANCY_LIMIT,
    OUTSIDE_LIMIT,
    QUANTILES,
    DriftError,
    baseline,
    drift,
    live_rho,
)
from eldr.calibration.fit_record import ClusterRecord
from eldr.calibration.kmeans import spherical_kmeans

DIMENSIONS = 16


def traffic(axes, rows=400, seed=0):
    """Unit rows around some axes."""
    rng = np.random.default_rng(seed)
    base = np.eye(DIMENSIONS)[rng.choice(axes, rows)] + rng.uniform(0, 0.3, (rows, DIMENSIONS))
    return (base / np.linalg.norm(base, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def fitted():
    rows = traffic([0, 1, 2, 3])
    found = spherical_kmeans(rows, 4)
    kept = baseline(rows, found.centroids)
    record = ClusterRecord(
        found.sizes, True, found.objective, 1, True, len(rows), distances=kept.distances, nearest=kept.nearest
    )
    return found.centroids, record


def test_the_same_kind_of_traffic_is_within_limits(fitted):
    found = drift(traffic([0, 1, 2, 3], seed=1), *fitted)
    assert found.outside == pytest.approx(0.05, abs=0.05)
    assert found.distance_ks < 0.15
    assert found.occupancy_tv < 0.15
    assert not found.refit_pays
    assert found.advice.startswith("within limits")


def test_a_new_domain_lies_outside(fitted):
    found = drift(traffic([9, 10], seed=1), *fitted)
    assert found.outside > 0.9
    assert found.distance_ks > 0.9
    assert found.refit_pays
    assert "outside the calibration" in found.advice


def test_another_mix_of_known_domains_fills_the_clusters_differently(fitted):
    found = drift(traffic([0], seed=1), *fitted)
    assert found.outside < OUTSIDE_LIMIT
    assert found.occupancy_tv == pytest.approx(0.75, abs=0.05)
    assert found.occupancy_tv > OCCUPANCY_LIMIT
    assert "clusters are filled differently" in found.advice


def test_the_calibration_itself_has_not_drifted(fitted):
    found = drift(traffic([0, 1, 2, 3]), *fitted)
    assert found.occupancy_tv == 0
    assert found.distance_ks < 0.02
    assert found.distance_median == pytest.approx(found.calibration_median)


def test_few_rows_other_dimensions_and_old_profiles_are_refused(fitted):
    centroids, record = fitted
    with pytest.raises(DriftError, match=f"at least {MIN_ROWS}"):
        drift(traffic([0], rows=MIN_ROWS - 1), *fitted)
    with pytest.raises(DriftError, match="rows have 15 dimensions, the centroids 16"):
        drift(traffic([0])[:, :15], *fitted)
    with pytest.raises(DriftError, match="fit it again"):
        drift(traffic([0]), centroids, dataclasses.replace(record, distances=()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_named(fitted, bad):
    rows = traffic([0])
    rows[17, 3] = bad
    with pytest.raises(DriftError, match="row 17 is not finite"):
        drift(rows, *fitted)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), axes=st.lists(st.integers(0, DIMENSIONS - 1), min_size=1, max_size=5))
def test_measures_are_bounded_and_do_not_depend_on_the_order_of_rows(fitted, seed, axes):
    rows = traffic(axes, rows=80, seed=seed)
    found = drift(rows, *fitted)
    shuffled = drift(np.random.default_rng(seed).permutation(rows), *fitted)
    for name in ("outside", "distance_ks", "occupancy_tv"):
        assert 0 <= getattr(found, name) <= 1
        assert getattr(shuffled, name) == pytest.approx(getattr(found, name), abs=0.02)
    assert sum(found.occupancy) == pytest.approx(1.0)


def test_duplicates_leave_a_profile_with_one_distance():
    rows = np.tile(np.eye(DIMENSIONS, dtype=np.float32)[:1], (60, 1))
    kept = baseline(rows, rows[:1])
    assert kept.nearest == (60,)
    assert len(kept.distances) == len(QUANTILES)
    found = drift(rows, rows[:1], ClusterRecord((60,), True, 1.0, 1, True, 1, kept.distances, kept.nearest))
    assert found.outside == 0


def test_live_rho_is_high_where_decode_follows_prefill():
    rng = np.random.default_rng(0)
    rows = traffic([0, 1, 2, 3], rows=100)
    decode = rng.poisson(200 * rows)[:, None, :]
    assert live_rho(rows, decode) > 0.6
    assert abs(live_rho(rows, rng.permutation(decode))) < 0.2
    with pytest.raises(DriftError, match="rho needs 50"):
        live_rho(rows[:10], decode[:10])
