import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.calibration.kmeans import KMeansError, spherical_kmeans


def unit(rows):
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def random_rows(rows=60, dimensions=12, seed=0):
    return unit(np.random.default_rng(seed).gamma(0.4, 1.0, size=(rows, dimensions)) + 1e-3)


def grouped_rows(sizes, noise=0.05, seed=0):
    rng = np.random.default_rng(seed)
    centres = np.eye(len(sizes), 10)
    return unit(np.repeat(centres, sizes, axis=0) + noise * rng.random((sum(sizes), 10)))


@pytest.mark.parametrize("rows", [7, 8, 60, 61])
@pytest.mark.parametrize("clusters", [1, 3, 7])
def test_balanced_sizes_differ_by_at_most_one(rows, clusters):
    found = spherical_kmeans(random_rows(rows), clusters, restarts=2)
    assert max(found.sizes) - min(found.sizes) <= 1
    assert sum(found.sizes) == rows


@given(
    rows=st.integers(2, 40),
    clusters=st.integers(1, 6),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 500),
)
def test_any_rows_give_balanced_sizes_and_unit_centroids(rows, clusters, repeats, seed):
    data = np.repeat(random_rows(rows, seed=seed), repeats, axis=0)
    clusters = min(clusters, len(data))
    found = spherical_kmeans(data, clusters, seed=seed, restarts=1)
    assert max(found.sizes) - min(found.sizes) <= 1
    np.testing.assert_allclose(np.linalg.norm(found.centroids, axis=1), 1.0, atol=1e-5)
    assert found.distinct == rows
    cosines = np.einsum("nd,nd->n", data, found.centroids[found.labels])
    assert found.objective == pytest.approx(cosines.mean(), abs=1e-5)


def test_equal_groups_are_found_by_both_kinds():
    rows = grouped_rows([10, 10, 10])
    for balanced in (True, False):
        found = spherical_kmeans(rows, 3, balanced=balanced)
        assert found.labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
        assert found.converged


def test_vanilla_follows_the_groups_where_balanced_splits_the_large_one():
    rows = grouped_rows([20, 5, 5])
    assert spherical_kmeans(rows, 3, balanced=False).sizes == (20, 5, 5)
    assert spherical_kmeans(rows, 3).sizes == (10, 10, 10)


def test_clusters_are_numbered_by_the_first_row_they_own():
    labels = spherical_kmeans(random_rows(), 5).labels
    assert [int(np.flatnonzero(labels == cluster)[0]) for cluster in range(5)] == sorted(
        int(np.flatnonzero(labels == cluster)[0]) for cluster in range(5)
    )


def test_a_fixed_seed_gives_identical_bytes():
    """Case 5.7."""
    first, second = (spherical_kmeans(random_rows(), 5, seed=3) for _ in range(2))
    assert first.centroids.tobytes() == second.centroids.tobytes()
    assert first.labels.tobytes() == second.labels.tobytes()


def test_more_restarts_never_end_worse():
    rows = random_rows(90, 20, seed=4)
    objectives = [spherical_kmeans(rows, 6, restarts=restarts).objective for restarts in (1, 2, 4, 8)]
    assert objectives == sorted(objectives)


def test_more_iterations_never_end_worse():
    rows = random_rows(90, 20, seed=5)
    objectives = [
        spherical_kmeans(rows, 6, restarts=1, max_iterations=iterations).objective
        for iterations in (1, 2, 3, 5, 50)
    ]
    assert objectives == pytest.approx(sorted(objectives), abs=1e-7)


def test_reaching_the_last_iteration_is_reported():
    """Case 5.7."""
    rows = random_rows(200, 30, seed=6)
    cut = spherical_kmeans(rows, 8, restarts=1, max_iterations=1)
    assert (cut.iterations, cut.converged) == (1, False)
    assert spherical_kmeans(rows, 8, restarts=1).converged


def test_symmetric_rows_stop_instead_of_swapping_for_ever():
    """Case 5.7: two assignments of equal cost."""
    rows = unit([[1, 0], [1, 0], [0, 1], [0, 1], [1, 1], [1, 1]])
    found = spherical_kmeans(rows, 2, max_iterations=1_000)
    assert found.converged
    assert found.iterations < 10


def test_fewer_rows_than_clusters_are_refused_with_both_numbers():
    """Case 5.1: 3 rows, K = 5."""
    with pytest.raises(KMeansError, match="clusters must be 1 to the number of rows, 3, got 5"):
        spherical_kmeans(random_rows(3), 5)


@pytest.mark.parametrize("balanced", [True, False])
def test_fewer_distinct_rows_than_clusters_are_counted_and_no_cluster_is_empty(balanced):
    """Case 5.1: 17 rows, 9 distinct, K = 10."""
    rows = np.concatenate([random_rows(9), random_rows(9)[:8]])
    found = spherical_kmeans(rows, 10, balanced=balanced)
    assert found.distinct == 9
    assert min(found.sizes) >= 1
    assert np.isfinite(found.centroids).all()


def test_equal_rows_are_split_evenly_between_equal_centroids():
    """Case 5.1: all rows equal, K = 2."""
    found = spherical_kmeans(np.repeat(random_rows(1), 10, axis=0), 2)
    assert found.distinct == 1
    assert found.sizes == (5, 5)
    np.testing.assert_allclose(found.centroids[0], found.centroids[1], atol=1e-6)


def test_rows_that_are_no_unit_vectors_are_refused_and_named():
    """Case 5.5: one NaN row, one infinite row and one zero row among 50."""
    rows = random_rows(50)
    rows[7, 0] = np.nan
    rows[20, 1] = np.inf
    rows[33] = 0.0
    with pytest.raises(KMeansError, match=r"3 do not: 7 \(norm nan\), 20 \(norm inf\), 33 \(norm 0\)"):
        spherical_kmeans(rows, 4)


@pytest.mark.parametrize("options", [{"restarts": 0}, {"max_iterations": 0}])
def test_numbers_below_one_are_refused(options):
    with pytest.raises(KMeansError, match="must be at least 1"):
        spherical_kmeans(random_rows(), 2, **options)


def test_rows_without_dimensions_are_refused():
    with pytest.raises(KMeansError, match=r"must be \[rows, dimensions\]"):
        spherical_kmeans(np.zeros((3, 0), dtype=np.float32), 1)


def test_rows_that_cancel_out_keep_a_unit_centroid():
    found = spherical_kmeans(unit([[1, 0], [-1, 0]]), 1)
    assert np.linalg.norm(found.centroids[0]) == pytest.approx(1.0)


def test_progress_hears_of_each_restart():
    heard: list[int] = []
    spherical_kmeans(random_rows(), 3, restarts=3, progress=heard.append)
    assert heard == [1, 2, 3]


def test_weights_give_a_faster_decoder_more_rows():
    found = spherical_kmeans(random_rows(80), 3, weights=[2, 1, 1], restarts=2)
    assert sorted(found.sizes) == [20, 20, 40]


def test_a_range_of_sizes_bounds_clusters_without_evening_them():
    rows = grouped_rows([30, 8, 2])
    assert sorted(spherical_kmeans(rows, 3, least=4).sizes) == [4, 8, 28]
    assert max(spherical_kmeans(rows, 3, most=20).sizes) == 20


def test_sizes_that_nothing_fits_are_refused_before_clustering():
    """Case 5.3."""
    with pytest.raises(KMeansError, match="3 clusters of 40 to 80 rows cannot hold 80 rows"):
        spherical_kmeans(random_rows(80), 3, least=40)
    with pytest.raises(KMeansError, match="need balanced clusters"):
        spherical_kmeans(random_rows(80), 3, weights=[1, 1, 1], balanced=False)


def test_a_warm_start_keeps_the_clusters_numbers_and_ends_where_it_began_if_nothing_changed():
    rows = random_rows(90)
    first = spherical_kmeans(rows, 5)
    order = [3, 1, 4, 0, 2]
    again = spherical_kmeans(rows, 5, start=first.centroids[order])
    np.testing.assert_allclose(again.centroids, first.centroids[order], atol=1e-5)
    assert again.iterations <= 2


def test_a_warm_start_of_another_shape_or_not_finite_is_refused():
    rows = random_rows()
    with pytest.raises(KMeansError, match=r"start must be finite, of shape \(3, 12\), got \(2, 12\)"):
        spherical_kmeans(rows, 3, start=rows[:2])
    start = rows[:3].copy()
    start[1, 1] = np.nan
    with pytest.raises(KMeansError, match="start must be finite"):
        spherical_kmeans(rows, 3, start=start)


def test_many_rows_are_screened_on_a_sample_and_all_of_them_clustered(monkeypatch):
    rows = grouped_rows([40, 40, 40], noise=0.3)
    whole = spherical_kmeans(rows, 3)
    monkeypatch.setattr("eldr.calibration.kmeans.SCREEN_ROWS", 30)
    screened = spherical_kmeans(rows, 3)
    assert screened.sizes == (40, 40, 40)
    np.testing.assert_array_equal(screened.labels, whole.labels)


def test_products_of_pairs_and_the_rows_themselves_give_the_same_clusters(monkeypatch):
    rows = random_rows(70, 20)
    from_pairs = spherical_kmeans(rows, 4, restarts=2)
    monkeypatch.setattr("eldr.calibration.kmeans.SCREEN_ROWS", 1)
    from_rows = spherical_kmeans(rows, 4, restarts=2)
    np.testing.assert_array_equal(from_pairs.labels, from_rows.labels)
    np.testing.assert_allclose(from_pairs.centroids, from_rows.centroids, atol=1e-6)
