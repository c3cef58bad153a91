import numpy as np
import pytest

from eldr.calibration.fit import FitError, FitSettings, Progress, fit
from eldr.calibration.profile import Profile
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.transform import TRANSFORMS


def fit_of(counts, progress=lambda _: None, **settings):
    return fit(
        counts,
        FitSettings(**{"clusters": 4, "restarts": 2, **settings}),
        counts_sha256="ab12",
        created="2026-01-02T03:04:05+00:00",
        eldr_version="0.1.0",
        progress=progress,
    )


def test_a_fit_finds_the_domains_and_fills_the_profile(make_counts):
    counts = make_counts(moe_layers=(1, 3, 5))
    result = fit_of(counts)
    profile = result.profile
    assert (profile.fingerprint, profile.moe_layers, profile.top_k) == ("model-a", (1, 3, 5), 2)
    assert profile.clustering.sizes == (10, 10, 10, 10)
    assert result.labels.tolist() == [row % 4 for row in range(40)]
    assert profile.provenance.requests == 40
    assert profile.provenance.counts_sha256 == "ab12"
    assert len(profile.quality) == len(TRANSFORMS)
    assert profile.transform in result.choice
    assert profile.warnings == ()


def test_live_signatures_are_nearest_to_the_centroid_of_their_cluster(make_counts):
    counts = make_counts()
    result = fit_of(counts)
    for row in range(counts.requests):
        length = int(counts.prompt_len[row])
        signature = ExpertSignature("model-a", 2, length, length, counts.prefill_counts[row])
        similarities = result.profile.similarities(signature)
        assert similarities is not None
        assert int(similarities.argmax()) == result.labels[row]


def test_equal_seeds_give_identical_bytes(make_counts):
    """Case 5.7."""
    first, second = (fit_of(make_counts(), seed=9).profile.to_bytes() for _ in range(2))
    assert first == second
    assert Profile.from_bytes(first).to_bytes() == first


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
def test_a_named_transform_is_used_and_judged_alone(make_counts, transform):
    profile = fit_of(make_counts(), transform=transform).profile
    assert profile.transform == transform
    assert [quality.transform for quality in profile.quality] == [transform]


def test_the_weights_are_learned_on_all_requests(make_counts):
    counts = make_counts()
    profile = fit_of(counts, transform="count-idf", select_layers=False).profile
    expected = TRANSFORMS["count-idf"].learn(counts.prefill_counts)
    np.testing.assert_allclose(profile.idf, expected, rtol=1e-6)


def test_counts_without_a_fingerprint_give_a_profile_that_says_so(make_counts):
    profile = fit_of(make_counts(fingerprint="")).profile
    assert profile.fingerprint == ""
    assert any("no model fingerprint" in warning for warning in profile.warnings)


def test_a_request_without_a_vector_is_left_out_and_named(make_counts):
    """Case 5.5: under plain idf a request whose experts all requests use has no signature."""
    counts = make_counts(layers=1, experts=4)
    prefill = np.zeros((40, 1, 4), dtype=np.int64)
    prefill[:, 0, 0] = counts.prompt_len
    prefill[:, 0, 1] = counts.prompt_len - 1
    prefill[np.arange(40), 0, 2 + np.arange(40) % 2] += 1
    prefill[7, 0] = [counts.prompt_len[7], counts.prompt_len[7], 0, 0]
    result = fit_of(
        make_counts(layers=1, experts=4, prefill_counts=prefill), clusters=2, transform="count-idf"
    )
    assert result.labels[7] == -1
    assert sum(result.profile.clustering.sizes) == 39
    assert "1 requests have no signature and were not clustered: r7" in result.profile.warnings


def test_requests_that_generated_nothing_are_clustered_but_judge_nothing(make_counts):
    """Case 1.14: max_tokens = 1."""
    decode = np.array(make_counts().decode_counts)
    decode[:5] = 0
    result = fit_of(make_counts(decode_counts=decode))
    assert (result.labels >= 0).all()
    assert "5 requests generated nothing and judge no transform" in result.profile.warnings


def test_a_few_requests_need_a_named_transform(make_counts):
    with pytest.raises(FitError, match="auto needs at least 20 requests with decode counts, got 8"):
        fit_of(make_counts(8))
    result = fit_of(make_counts(8), transform="count")
    assert result.profile.quality == ()
    assert result.profile.layer_mask == (0, 1, 2)
    assert any("quality unknown" in warning for warning in result.profile.warnings)


def test_more_clusters_than_requests_are_refused_with_both_numbers(make_counts):
    """Case 5.1."""
    with pytest.raises(FitError, match="clusters must be at most the 40 usable requests, got 41"):
        fit_of(make_counts(), clusters=41)


def test_fewer_distinct_signatures_than_clusters_are_warned_about(make_counts):
    """Case 5.1."""
    counts = make_counts()
    same = np.repeat(counts.prefill_counts[:3], 14, axis=0)[:40]
    length = np.repeat(counts.prompt_len[:3], 14)[:40]
    profile = fit_of(make_counts(prefill_counts=same, prompt_len=length), clusters=5).profile
    assert "only 3 distinct signatures for 5 clusters: some centroids are equal" in profile.warnings
    assert profile.clustering.distinct_rows == 3
    assert profile.clustering.sizes == (8, 8, 8, 8, 8)


def test_more_requests_than_can_be_clustered_are_sampled_and_said(make_counts):
    """Case 5.6."""
    result = fit_of(make_counts(), max_requests=30)
    assert "clustered a sample of 30 of 40 requests" in result.profile.warnings
    assert (result.labels >= 0).sum() == 30
    with pytest.raises(FitError, match="max_requests must be at least clusters, 4, got 3"):
        fit_of(make_counts(), max_requests=3)


def test_a_clustering_that_still_moves_is_warned_about(make_counts):
    """Case 5.7: reaching the last iteration is written into the profile."""
    profile = fit_of(make_counts(), max_iterations=1).profile
    assert not profile.clustering.converged
    assert "the clusters still moved after 1 iterations" in profile.warnings


def test_vanilla_clusters_may_differ_in_size(make_counts):
    counts = make_counts(60)
    rows = np.array(
        [*range(0, 60, 4), *range(0, 60, 4), *range(1, 60, 4), *range(2, 32, 4), *range(3, 31, 4)]
    )
    skewed = make_counts(60, prefill_counts=counts.prefill_counts[rows], prompt_len=counts.prompt_len[rows])
    profile = fit_of(skewed, clusters=3, balanced=False).profile
    assert not profile.clustering.balanced
    assert max(profile.clustering.sizes) - min(profile.clustering.sizes) > 1


def test_progress_goes_through_both_stages(make_counts):
    heard: list[Progress] = []
    fit_of(make_counts(), heard.append)
    assert {progress.stage for progress in heard} == {"transforms", "clusters"}
    assert heard[-1] == Progress("clusters", 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clusters": 0}, "clusters must be 1 to 4096, got 0"),
        ({"transform": "tf"}, "transform must be one of count-idf, .*, got 'tf'; or auto"),
        ({"held_out": 0.9}, "held_out must be 0.1 to 0.5, got 0.9"),
        ({"held_out": float("nan")}, "held_out must be 0.1 to 0.5, got nan"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"restarts": 0}, "restarts must be 1 to 1000, got 0"),
        ({"max_iterations": 0}, "max_iterations must be 1 to"),
        ({"pairs": 10}, "pairs must be 100 to"),
        ({"max_requests": 0}, "max_requests must be 1 to 1000000, got 0"),
    ],
)
def test_settings_out_of_range_are_named_with_value_and_range(settings, message):
    with pytest.raises(FitError, match=message):
        FitSettings(**{"clusters": 4, **settings})
