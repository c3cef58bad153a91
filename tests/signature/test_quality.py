import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eldr.signature.quality import (
    QualityError,
    average_ranks,
    pair_products,
    request_pairs,
    rho_gain_interval,
    select_layers,
    signature_quality,
    spearman,
)

values = hnp.arrays(np.float64, st.integers(3, 40), elements=st.integers(-4, 4).map(float))


def requests_of(seed, requests=30, layers=4, experts=6):
    return np.random.default_rng(seed).poisson(2.0, size=(requests, layers, experts))


def reference_distances(vectors):
    flat = vectors.reshape(len(vectors), -1).astype(float)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return 1.0 - flat @ flat.T


def test_all_pairs_come_where_the_limit_allows_them():
    pairs = request_pairs(7, 21, seed=0)
    found = list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    assert sorted(found) == [(i, j) for i in range(7) for j in range(i + 1, 7)]


@given(requests=st.integers(3, 400), seed=st.integers(0, 9))
def test_a_sample_has_distinct_ordered_pairs_of_existing_requests(requests, seed):
    pairs = request_pairs(requests, 50, seed)
    assert len(set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))) == len(pairs.first)
    assert len(pairs.first) == min(50, requests * (requests - 1) // 2)
    assert (pairs.first >= 0).all()
    assert (pairs.first < pairs.second).all()
    assert (pairs.second < requests).all()


def test_pair_numbers_stay_exact_for_a_hundred_thousand_requests():
    pairs = request_pairs(100_000, 1_000, seed=1)
    assert (pairs.first < pairs.second).all()
    assert pairs.second.max() < 100_000


def test_equal_seeds_give_equal_samples():
    a, b, c = (request_pairs(500, 100, seed) for seed in (1, 1, 2))
    assert np.array_equal(a.first, b.first)
    assert not np.array_equal(a.first, c.first)


@pytest.mark.parametrize(("requests", "limit"), [(2, 100), (10, 2)])
def test_too_few_requests_or_pairs_are_refused(requests, limit):
    with pytest.raises(QualityError, match="must be at least 3"):
        request_pairs(requests, limit, 0)


@given(values)
def test_ranks_equal_those_of_scipy_with_ties_averaged(values):
    np.testing.assert_array_equal(average_ranks(values), scipy.stats.rankdata(values) - 1.0)


@given(values, st.randoms(use_true_random=False))
def test_spearman_equals_that_of_scipy(values, random):
    other = np.array(random.choices(range(5), k=len(values)), dtype=float)
    if np.ptp(values) == 0 or np.ptp(other) == 0:
        assert spearman(values, other) == 0.0
    else:
        assert spearman(values, other) == pytest.approx(scipy.stats.spearmanr(values, other).statistic)


def test_a_constant_side_gives_zero_and_not_nan():
    assert spearman(np.ones(5), np.arange(5.0)) == 0.0


def test_distances_equal_a_direct_computation_for_every_subset_of_layers():
    vectors = requests_of(0)
    pairs = request_pairs(30, 1_000, seed=0)
    products = pair_products(vectors, pairs)
    for layers in ([0], [1, 3], [0, 1, 2, 3]):
        expected = reference_distances(vectors[:, layers])[pairs.first, pairs.second]
        np.testing.assert_allclose(products.distances(layers), expected, atol=1e-11)


def test_many_pairs_are_gathered_in_parts_without_a_seam():
    vectors = requests_of(1, requests=80)
    pairs = request_pairs(80, 10_000, seed=0)
    expected = reference_distances(vectors)[pairs.first, pairs.second]
    np.testing.assert_allclose(pair_products(vectors, pairs).distances(range(4)), expected, atol=1e-11)


def test_a_zero_vector_is_at_distance_one_of_everything():
    """Case 3.20."""
    vectors = requests_of(2, requests=4)
    vectors[2] = 0
    pairs = request_pairs(4, 10, seed=0)
    distances = pair_products(vectors, pairs).distances(range(4))
    assert (distances[(pairs.first == 2) | (pairs.second == 2)] == 1.0).all()
    assert np.isfinite(distances).all()


def test_equal_requests_tie_exactly():
    vectors = requests_of(3, requests=6).astype(np.float32) * np.float32(0.1)
    vectors[4] = vectors[1]
    pairs = request_pairs(6, 20, seed=0)
    distance = {
        frozenset((int(i), int(j))): d
        for i, j, d in zip(
            pairs.first, pairs.second, pair_products(vectors, pairs).distances(range(4)), strict=True
        )
    }
    assert distance[frozenset((1, 4))] == 0.0
    assert distance[frozenset((0, 1))] == distance[frozenset((0, 4))]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_with_the_request(bad):
    vectors = requests_of(4, requests=5).astype(float)
    vectors[3, 2, 1] = bad
    with pytest.raises(QualityError, match="request 3: values of layer 2 are not finite"):
        pair_products(vectors, request_pairs(5, 10, 0))


def test_vectors_of_other_requests_are_refused():
    with pytest.raises(QualityError, match="of 5 requests"):
        pair_products(requests_of(0, requests=4), request_pairs(5, 10, 0))


@given(seed=st.integers(0, 500), factor=st.integers(2, 7))
def test_quality_ignores_the_order_of_requests_and_the_length_of_prompts(seed, factor):
    prefill, decode = requests_of(seed, 12), requests_of(seed + 1, 12)
    pairs = request_pairs(12, 1_000, 0)
    rho = signature_quality(prefill, decode, pairs, range(4))
    order = np.random.default_rng(seed).permutation(12)
    lengths = np.random.default_rng(seed).integers(1, factor, size=(12, 1, 1))
    assert signature_quality(prefill[order], decode[order], pairs, range(4)) == pytest.approx(rho, abs=1e-9)
    assert signature_quality(prefill * lengths, decode, pairs, range(4)) == pytest.approx(rho, abs=1e-9)


def test_signatures_equal_to_decode_have_quality_one():
    decode = requests_of(5)
    assert signature_quality(decode * 3, decode, request_pairs(30, 1_000, 0), range(4)) == pytest.approx(1.0)


def test_selection_takes_the_informative_layers_first_and_stops_at_the_peak():
    decode = requests_of(6, requests=60, layers=2)
    prefill = np.concatenate([requests_of(7, requests=60, layers=3) * 3, decode], axis=1)
    pairs = request_pairs(60, 10_000, 0)
    found = select_layers(pair_products(prefill, pairs), pair_products(decode, pairs).distances(range(2)))
    assert found.layers == (3, 4)
    assert set(found.order[:2]) == {3, 4}
    assert sorted(found.order) == list(range(5))
    assert found.curve[1] == pytest.approx(1.0)


def test_selection_equals_a_plain_search_over_all_layers():
    prefill, decode = requests_of(8), requests_of(9) + requests_of(8)
    pairs = request_pairs(30, 1_000, 0)
    found = select_layers(pair_products(prefill, pairs), pair_products(decode, pairs).distances(range(4)))
    kept: list[int] = []
    for layer, rho in zip(found.order, found.curve, strict=True):
        trials = {
            other: signature_quality(prefill, decode, pairs, [*kept, other])
            for other in range(4)
            if other not in kept
        }
        assert layer == max(trials, key=trials.__getitem__)
        assert rho == pytest.approx(trials[layer])
        kept.append(layer)


def test_the_shortest_prefix_wins_where_several_reach_the_peak():
    """Case 3.20: equal layers tie, and no NaN of a constant layer can win."""
    one = requests_of(10, layers=1)
    prefill = np.concatenate([np.ones_like(one), one, one], axis=1)
    pairs = request_pairs(30, 1_000, 0)
    found = select_layers(pair_products(prefill, pairs), pair_products(one, pairs).distances([0]))
    assert found.layers == (1,)


def test_distances_of_other_pairs_are_refused():
    pairs = request_pairs(30, 1_000, 0)
    with pytest.raises(QualityError, match="must have 435 pairs"):
        select_layers(pair_products(requests_of(0), pairs), np.zeros(3))


def test_the_interval_of_a_gain_holds_zero_where_two_measures_are_alike_and_not_where_one_is_noise():
    rng = np.random.default_rng(0)
    pairs = request_pairs(60, 2_000, 0)
    target = rng.random(len(pairs.first))
    alike = [target + 0.2 * rng.random(len(target)) for _ in range(2)]
    low, high = rho_gain_interval(pairs, *alike, target, 0)
    assert low < 0 < high
    low, high = rho_gain_interval(pairs, alike[0], rng.random(len(target)), target, 0)
    assert 0.5 < low < high < 1.2


def test_the_interval_of_a_gain_is_zero_for_equal_measures_and_depends_on_the_seed_alone():
    pairs = request_pairs(20, 100, 0)
    target = np.random.default_rng(0).random(len(pairs.first))
    assert rho_gain_interval(pairs, target, target, target[::-1].copy(), 3) == (0.0, 0.0)
    other = np.round(target, 1)
    assert rho_gain_interval(pairs, target, other, target, 3) == rho_gain_interval(
        pairs, target, other, target, 3
    )
