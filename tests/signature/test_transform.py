import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eldr.signature.transform import GATE_TRANSFORMS, TRANSFORMS, TransformError, transform_named, unit_rows

ALL = sorted(TRANSFORMS)
counts_arrays = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5)),
    elements=st.integers(0, 300),
)


def weighted(name, counts):
    transform = TRANSFORMS[name]
    return transform.weigh(counts, transform.learn(counts))


def test_the_published_idf_is_the_logarithm_of_requests_over_requests_with_the_expert():
    counts = np.array([[[3, 0, 1]], [[1, 0, 0]], [[5, 0, 0]]])
    weights = TRANSFORMS["count-idf"].learn(counts)
    assert weights == pytest.approx(np.log([[4 / 4, 4 / 1, 4 / 2]]))
    assert TRANSFORMS["count-idf"].weigh(counts, weights)[0, 0, 2] == pytest.approx(np.log(2))


def test_the_smoothed_idf_never_reaches_zero_for_an_expert_that_all_requests_use():
    everywhere = np.ones((7, 1, 2), dtype=int)
    assert (TRANSFORMS["count-idf"].learn(everywhere) == 0.0).all()
    assert (TRANSFORMS["count-smoothed-idf"].learn(everywhere) == 1.0).all()


def test_transforms_without_idf_learn_ones_and_shape_the_counts():
    counts = np.array([[[4, 0, 9]]])
    assert weighted("count", counts).tolist() == [[[4, 0, 9]]]
    assert weighted("sqrt", counts).tolist() == [[[2, 0, 3]]]
    assert weighted("binary", counts).tolist() == [[[1, 0, 1]]]


def test_an_unknown_transform_is_refused_with_the_known_ones():
    with pytest.raises(TransformError, match=r"one of count-idf, .*binary, got 'tf'"):
        transform_named("tf")


def test_every_transform_states_its_formula_and_source():
    assert all(transform.formula and transform.source for transform in TRANSFORMS.values())
    assert [transform.name for transform in TRANSFORMS.values()] == list(TRANSFORMS)


@pytest.mark.parametrize("shape", [(2, 3), (0, 2, 3)])
def test_weights_are_learned_from_requests_only(shape):
    with pytest.raises(TransformError, match=r"must be \[requests, layers, experts\]"):
        TRANSFORMS["count"].learn(np.zeros(shape))


def test_counts_of_another_shape_than_the_weights_are_refused():
    with pytest.raises(TransformError, match=r"counts are \(2, 4\), weights \(2, 3\)"):
        TRANSFORMS["count"].weigh(np.zeros((5, 2, 4)), np.ones((2, 3)))


@pytest.mark.parametrize("name", ALL)
@given(counts=counts_arrays, seed=st.integers(0, 99))
def test_the_order_of_requests_does_not_matter(name, counts, seed):
    order = np.random.default_rng(seed).permutation(len(counts))
    assert np.array_equal(weighted(name, counts[order]), weighted(name, counts)[order])


@pytest.mark.parametrize("name", ALL)
@given(counts=counts_arrays, factor=st.integers(1, 9))
def test_the_length_of_a_prompt_does_not_change_its_unit_vector(name, counts, factor):
    layers = range(counts.shape[1])
    short, long = (unit_rows(weighted(name, rows), layers) for rows in (counts, counts * factor))
    np.testing.assert_allclose(short.rows, long.rows, atol=1e-6)
    assert (short.usable == long.usable).all()


@given(counts=counts_arrays)
def test_rows_have_norm_one_or_are_named_as_zero(counts):
    units = unit_rows(weighted("count", counts), range(counts.shape[1]))
    norms = np.linalg.norm(units.rows, axis=1)
    np.testing.assert_allclose(norms[units.usable], 1.0, atol=1e-6)
    assert units.zero == tuple(np.flatnonzero(counts.sum(axis=(1, 2)) == 0))
    assert (norms[~units.usable] == 0.0).all()


def test_zero_nan_and_infinite_rows_are_named_outcomes_and_never_nan():
    """Case 3.20: all-zero, NaN and inf signatures."""
    rows = np.ones((5, 1, 2), dtype=np.float32)
    rows[1] = 0.0
    rows[2, 0, 1] = np.nan
    rows[4, 0, 0] = np.inf
    units = unit_rows(rows, [0])
    assert units.zero == (1,)
    assert units.non_finite == (2, 4)
    assert units.usable.tolist() == [True, False, False, True, False]
    assert np.isfinite(units.rows).all()


def test_a_row_whose_experts_all_have_weight_zero_is_a_zero_row():
    everywhere = np.ones((3, 1, 2), dtype=int)
    assert unit_rows(weighted("count-idf", everywhere), [0]).zero == (0, 1, 2)


def test_only_the_kept_layers_enter_the_vector():
    rows = np.array([[[3.0, 4.0], [7.0, 7.0]]], dtype=np.float32)
    assert unit_rows(rows, [0]).rows == pytest.approx(np.array([[0.6, 0.8]]))


@pytest.mark.parametrize("layers", [[], [2], [-1]])
def test_layers_that_do_not_exist_are_refused(layers):
    with pytest.raises(TransformError, match="layers must be some of 0 to 1"):
        unit_rows(np.ones((1, 2, 2), dtype=np.float32), layers)


def test_very_large_and_very_small_values_keep_norm_one():
    rows = np.array([[[3e30, 4e30]], [[3e-38, 4e-38]]], dtype=np.float32)
    assert unit_rows(rows, [0]).rows == pytest.approx(np.array([[0.6, 0.8], [0.6, 0.8]]), abs=1e-6)


@pytest.mark.parametrize("name", sorted(GATE_TRANSFORMS))
def test_a_gate_transform_stands_in_no_profile_and_says_why(name):
    with pytest.raises(TransformError, match="live signatures carry counts only"):
        transform_named(name)
    assert not GATE_TRANSFORMS[name].live


def test_gate_sums_are_compared_as_they_are_and_centred_logits_without_their_offset():
    sums = np.array([[[1.0, 2.0, 6.0]], [[-3.0, 0.0, 0.0]]], np.float32)
    for name in ("gate-probability", "gate-logit"):
        np.testing.assert_array_equal(GATE_TRANSFORMS[name].weigh(sums, np.ones((1, 3))), sums)
    centred = GATE_TRANSFORMS["gate-logit-centred"].weigh(sums, np.ones((1, 3)))
    np.testing.assert_allclose(centred, [[[-2, -1, 3]], [[-2, 1, 1]]])
    shifted = GATE_TRANSFORMS["gate-logit-centred"].weigh(sums + 5, np.ones((1, 3)))
    np.testing.assert_allclose(shifted, centred, atol=1e-6)


@given(counts=counts_arrays, factor=st.integers(2, 50))
def test_longer_prompts_of_the_same_mixture_have_the_same_signature(counts, factor):
    """Scale invariance, for every transform whose element is a power of the count."""
    for name in ("count-idf", "count-smoothed-idf", "count", "sqrt", "binary"):
        layers = range(counts.shape[1])
        weights = TRANSFORMS[name].learn(counts)
        short = unit_rows(TRANSFORMS[name].weigh(counts, weights), layers).rows
        long = unit_rows(TRANSFORMS[name].weigh(counts * factor, weights), layers).rows
        np.testing.assert_allclose(short, long, atol=1e-5)


@given(counts=counts_arrays, seed=st.integers(0, 100))
def test_requests_keep_their_vectors_in_any_order(counts, seed):
    order = np.random.default_rng(seed).permutation(len(counts))
    for name in ALL:
        layers = range(counts.shape[1])
        plain = unit_rows(weighted(name, counts), layers)
        shuffled = unit_rows(weighted(name, counts[order]), layers)
        np.testing.assert_array_equal(plain.rows[order], shuffled.rows)
