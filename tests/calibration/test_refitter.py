import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.calibration.refit import Centroids, RefitError, RefitOutcome, RefitSettings, Refitter, owned_rows

DIMENSIONS = 12


def unit(rows):
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def groups(count, per_group=10, seed=0):
    """Rows around `count` axes, in random order, and the group of each."""
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(count * per_group) % count)
    return unit(np.eye(DIMENSIONS)[label] + rng.uniform(0, 0.1, (len(label), DIMENSIONS))), label


def names(count):
    return [f"d{i}" for i in range(count)]


def owner(result, axis):
    """The decoder whose centroid points along an axis."""
    return result.centroids.owners[int((result.centroids.rows @ np.eye(DIMENSIONS)[axis]).argmax())]


def test_each_decoder_gets_the_centroid_of_a_group():
    rows, _ = groups(4)
    result = Refitter().refit(rows, None, names(4))
    assert result.outcome is RefitOutcome.REFITTED
    assert sorted(owner(result, axis) for axis in range(4)) == names(4)


def test_a_refit_on_the_same_traffic_moves_nothing():
    rows, _ = groups(4)
    first = Refitter().refit(rows, None, names(4)).centroids
    again = Refitter().refit(rows, first, names(4))
    np.testing.assert_allclose(again.centroids.rows, first.rows, atol=1e-6)
    assert again.shift == pytest.approx(0.0, abs=1e-6)


def test_centroids_stay_with_their_decoders_whatever_their_order_was():
    rows, _ = groups(4)
    start = Centroids(unit(np.eye(DIMENSIONS)[[2, 0, 3, 1]]), ("d1", "d3", "d0", "d2"))
    result = Refitter().refit(rows, start, names(4))
    assert [owner(result, axis) for axis in range(4)] == ["d3", "d2", "d1", "d0"]


def test_a_decoder_that_joins_gets_the_group_that_nobody_had():
    rows, _ = groups(4)
    start = Centroids(unit(np.eye(DIMENSIONS)[:3]), ("d0", "d1", "d2"))
    result = Refitter().refit(rows, start, names(4))
    assert [owner(result, axis) for axis in range(4)] == names(4)


def test_the_others_keep_their_groups_where_a_decoder_leaves():
    rows, _ = groups(3)
    start = Centroids(unit(np.eye(DIMENSIONS)[:4]), tuple(names(4)))
    result = Refitter().refit(rows, start, ["d0", "d1", "d2"])
    assert result.centroids.owners == ("d0", "d1", "d2")
    assert [owner(result, axis) for axis in range(3)] == ["d0", "d1", "d2"]


def test_a_profile_of_another_size_is_owned_by_position():
    start = Centroids(unit(np.eye(DIMENSIONS)[:4]))
    two = owned_rows(start, names(2), DIMENSIONS)
    np.testing.assert_allclose(two["d0"], unit([np.eye(DIMENSIONS)[0] + np.eye(DIMENSIONS)[2]])[0])
    assert owned_rows(start, names(6), DIMENSIONS).keys() == set(names(4))


def test_a_small_window_keeps_the_centroids_in_force():
    rows, _ = groups(4, per_group=3)
    start = Centroids(unit(np.eye(DIMENSIONS)[:4]))
    result = Refitter().refit(rows, start, names(4))
    assert result.outcome is RefitOutcome.WINDOW_TOO_SMALL
    assert result.centroids is start
    assert result.detail == "12 usable signatures, 4 decoders need 16"


def test_an_empty_window_is_too_small():
    result = Refitter().refit(np.zeros((0, 0), np.float32), None, ["d0"])
    assert result.outcome is RefitOutcome.WINDOW_TOO_SMALL


def test_fewer_distinct_signatures_than_decoders_keep_the_centroids_in_force():
    rows = unit(np.eye(DIMENSIONS)[np.arange(40) % 3])
    result = Refitter().refit(rows, None, names(4))
    assert (result.outcome, result.centroids) == (RefitOutcome.TOO_FEW_DISTINCT, None)
    assert result.detail == "3 distinct signatures for 4 decoders"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_row_that_is_not_finite_or_has_no_norm_never_enters(bad):
    """Case 3.20."""
    rows, _ = groups(4)
    clean = Refitter().refit(rows, None, names(4))
    dirty = Refitter().refit(np.insert(rows, 7, np.full(DIMENSIONS, bad, np.float32), 0), None, names(4))
    assert dirty.dropped == 1
    np.testing.assert_array_equal(dirty.centroids.rows, clean.centroids.rows)


def test_a_refit_that_fails_is_named_and_keeps_the_centroids():
    rows, _ = groups(2)
    result = Refitter().refit(rows, None, names(2), weights={"d0": 1.0, "d1": float("nan")})
    assert result.outcome is RefitOutcome.FAILED
    assert "weights" in result.detail


def test_a_faster_decoder_gets_a_larger_cluster():
    rows = unit(np.random.default_rng(0).random((30, DIMENSIONS)))
    result = Refitter().refit(rows, None, names(2), weights={"d0": 2.0, "d1": 1.0})
    assert result.outcome is RefitOutcome.REFITTED


def test_centroids_of_another_model_are_no_start():
    rows, _ = groups(4)
    result = Refitter().refit(rows, Centroids(unit(np.eye(5)[:4]), tuple(names(4))), names(4))
    assert result.outcome is RefitOutcome.REFITTED
    assert result.centroids.rows.shape == (4, DIMENSIONS)


@pytest.mark.parametrize("decoders", [[], ["d0", "d0"]])
def test_decoders_must_be_distinct_and_at_least_one(decoders):
    with pytest.raises(RefitError, match="decoders must be distinct"):
        Refitter().refit(groups(2)[0], None, decoders)


@pytest.mark.parametrize("name", ["rows_per_decoder", "max_iterations", "restarts"])
def test_settings_out_of_range_are_refused_by_name(name):
    with pytest.raises(RefitError, match=f"{name} must be 1 to"):
        RefitSettings(**{name: 0})


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 60),
    copies=st.integers(1, 4),
    before=st.lists(st.sampled_from(names(6)), unique=True),
    after=st.lists(st.sampled_from(names(6)), unique=True, min_size=1),
)
def test_any_change_of_the_fleet_gives_unit_centroids_one_per_decoder(seed, rows, copies, before, after):
    rng = np.random.default_rng(seed)
    window = np.repeat(unit(rng.random((rows, DIMENSIONS)) + 1e-3), copies, axis=0)
    start = Centroids(unit(rng.random((len(before), DIMENSIONS))), tuple(before)) if before else None
    result = Refitter().refit(window, start, after)
    again = Refitter().refit(window.copy(), start, after[::-1])
    assert result.outcome is again.outcome
    if result.outcome is not RefitOutcome.REFITTED:
        assert result.centroids is start
        return
    np.testing.assert_array_equal(result.centroids.rows, again.centroids.rows)
    assert result.centroids.owners == tuple(sorted(after))
    np.testing.assert_allclose(np.linalg.norm(result.centroids.rows, axis=1), 1.0, atol=1e-4)
