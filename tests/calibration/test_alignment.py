import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr.calibration.alignment import alignment


def unit_rows(rows, seed=0):
    drawn = np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@given(clusters=st.integers(1, 12), seed=st.integers(0, 500))
def test_shuffled_centroids_find_their_places(clusters, seed):
    before = unit_rows(clusters, seed)
    order = np.random.default_rng(seed).permutation(clusters)
    after = before[order]
    np.testing.assert_array_equal(after[alignment(after, before)], before)


def test_more_centroids_than_before_leave_some_unused_and_fewer_leave_places_empty():
    before = unit_rows(4)
    assert sorted(alignment(unit_rows(6, 1), before).tolist()) == sorted(
        set(alignment(unit_rows(6, 1), before))
    )
    assert (alignment(before[:3], before) >= 0).sum() == 3
    assert alignment(before[[2, 0]], before).tolist() == [1, -1, 0, -1]
