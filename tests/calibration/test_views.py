import numpy as np
import pytest

from eldr.calibration.views import prefill_decode, projection, purity


def test_the_projection_is_that_of_a_full_decomposition():
    rows = np.random.default_rng(0).random((30, 6)).astype(np.float32)
    found = projection(rows, rows[:2])
    scale = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    assert found.explained == pytest.approx(tuple(scale[:2] ** 2 / (scale**2).sum()), rel=1e-4)
    assert found.centroids == pytest.approx(found.rows[:2], abs=1e-5)
    with pytest.raises(ValueError, match="that differ"):
        projection(np.ones((5, 5), np.float32), rows[:1])


def test_purity_counts_labelled_requests_only():
    assert purity([0, 0, 0, 1, 1], ["a", "a", "b", "b", ""]) == 0.75
    assert purity([0], [""]) == 0.0


def test_prefill_shares_that_decode_repeats_correlate_fully():
    counts = np.random.default_rng(0).integers(0, 9, size=(10, 2, 4)) + 1
    assert prefill_decode(counts, 2 * counts).correlations == pytest.approx(np.ones(8))
    with pytest.raises(ValueError, match="3 requests that generated"):
        prefill_decode(counts, np.zeros_like(counts))
