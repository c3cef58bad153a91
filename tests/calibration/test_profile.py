import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from eldr.calibration import profile as profile_module
from eldr.calibration.artifact import Artifact, pack, unpack
from eldr.calibration.fit_record import ClusterRecord, Provenance, TransformQuality
from eldr.calibration.profile import Profile, ProfileError, ProfileMismatchError
from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import ModelGeometry
from eldr.signature.transform import TRANSFORMS, unit_rows

RNG = np.random.default_rng(0)
IDF = RNG.random((3, 4)).astype(np.float32)
CENTROIDS = RNG.random((5, 8)).astype(np.float32)
CENTROIDS /= np.linalg.norm(CENTROIDS, axis=1, keepdims=True)


def make_profile(**changes) -> Profile:
    fields = {
        "fingerprint": "model-a",
        "moe_layers": (1, 3, 5),
        "experts": 4,
        "top_k": 2,
        "transform": "count-idf",
        "idf": IDF,
        "layer_mask": (0, 2),
        "centroids": CENTROIDS,
        "quality": (TransformQuality("count-idf", 0.8, 0.7, 0.75, (0, 2), (2, 0, 1), (0.6, 0.75, 0.7)),),
        "clustering": ClusterRecord((2, 2, 2, 2, 1), True, 0.9, 7, True, 9),
        "provenance": Provenance("ab12", 9, "2026-01-02T03:04:05+00:00", "0.1.0", 3),
        "warnings": ("one", "two"),
    }
    return Profile(**{**fields, **changes})


def make_signature(counts=None, fingerprint="model-a", top_k=2) -> ExpertSignature:
    counts = np.array([[6, 2, 0, 0], [4, 4, 0, 0], [0, 1, 3, 4]]) if counts is None else np.asarray(counts)
    tokens = int(counts[0].sum()) // top_k
    return ExpertSignature(fingerprint, top_k, tokens, tokens, counts)


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@pytest.mark.parametrize("mask", [(0, 2), (0, 1, 2), (1,)])
def test_a_live_vector_equals_that_of_the_fit(transform, mask):
    centroids = np.eye(2, 4 * len(mask))
    clustering = ClusterRecord((1, 1), True, 1.0, 1, True, 2)
    profile = make_profile(transform=transform, layer_mask=mask, centroids=centroids, clustering=clustering)
    signature = make_signature()
    expected = unit_rows(TRANSFORMS[transform].weigh(signature.counts[None], IDF), mask).rows[0]
    vector = profile.vector(signature)
    assert vector is not None
    assert vector.dtype == np.float32
    np.testing.assert_allclose(vector, expected, atol=1e-6)
    similarities = profile.similarities(signature)
    assert similarities is not None
    np.testing.assert_allclose(similarities, expected[:2], atol=1e-6)


def test_similarities_are_cosines_with_each_centroid():
    profile = make_profile()
    vector, similarities = profile.vector(make_signature()), profile.similarities(make_signature())
    assert vector is not None
    assert similarities is not None
    assert similarities.shape == (profile.clusters,) == (5,)
    np.testing.assert_allclose(similarities, CENTROIDS @ vector, atol=1e-6)


def test_a_signature_of_no_token_has_no_vector():
    """Case 3.20."""
    empty = make_signature(np.zeros((3, 4), int))
    assert make_profile().vector(empty) is None
    assert make_profile().similarities(empty) is None


def test_a_signature_of_weightless_experts_has_no_vector():
    """Case 3.20: every selected expert has idf 0."""
    profile = make_profile(idf=np.zeros((3, 4)))
    assert profile.vector(make_signature()) is None
    assert profile.similarities(make_signature()) is None


def test_a_signature_of_another_model_raises_with_both_values():
    profile = make_profile()
    for signature, field, mine, theirs in [
        (make_signature(fingerprint="model-b"), "fingerprint", "model-a", "model-b"),
        (make_signature(np.full((2, 4), 2)), "[layers, experts]", (3, 4), (2, 4)),
        (make_signature(top_k=1), "top_k", 2, 1),
    ]:
        for method in (profile.vector, profile.similarities):
            with pytest.raises(ProfileMismatchError) as caught:
                method(signature)
            assert (caught.value.field, caught.value.profile, caught.value.other) == (field, mine, theirs)
            assert f"{field} differs: the profile has {mine!r}, the signature has {theirs!r}" in str(
                caught.value
            )


def test_a_mismatch_is_an_error_of_profile_and_signature():
    """So that routing, which knows signatures only, can name it."""
    assert issubclass(ProfileMismatchError, ProfileError)
    assert issubclass(ProfileMismatchError, SignatureError)


def test_a_fleet_of_another_model_is_refused_with_both_values():
    profile = make_profile()
    profile.require_geometry(ModelGeometry((1, 3, 5), 4, 2, "model-a"))
    with pytest.raises(ProfileMismatchError, match="'model-a', the fleet has 'model-b'"):
        profile.require_geometry(ModelGeometry((1, 3, 5), 4, 2, "model-b"))
    with pytest.raises(ProfileMismatchError, match=r"moe_layers differs: the profile has \(1, 3, 5\)"):
        profile.require_geometry(ModelGeometry((0, 1, 2), 4, 2, "model-a"))


def test_a_saved_profile_loads_as_it_was(tmp_path):
    profile = make_profile()
    profile.save(tmp_path / "p.eldr")
    again = Profile.load(tmp_path / "p.eldr")
    for field in dataclasses.fields(Profile):
        if field.init and field.name not in ("idf", "centroids"):
            assert getattr(again, field.name) == getattr(profile, field.name)
    assert np.array_equal(again.idf, profile.idf)
    assert np.array_equal(again.centroids, profile.centroids)
    assert again.to_bytes() == profile.to_bytes()
    np.testing.assert_array_equal(
        again.similarities(make_signature()), profile.similarities(make_signature())
    )


def test_arrays_are_read_only_and_copies():
    idf = IDF.copy()
    profile = make_profile(idf=idf)
    idf[0, 0] = 99.0
    assert profile.idf[0, 0] == IDF[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        profile.centroids[0, 0] = 1.0


def test_wrong_files_are_refused_with_their_path(tmp_path):
    path = tmp_path / "p.eldr"
    data = make_profile().to_bytes()
    for wrong, message in [
        (data[:-3], "truncated"),
        (data[:-3] + b"abc", "checksum does not match"),
        (b"\x93NUMPY" + data, "not an eldr profile"),
        (b"", "not an eldr profile"),
    ]:
        path.write_bytes(wrong)
        with pytest.raises(ProfileError, match=f"p.eldr: {message}"):
            Profile.load(path)


def test_a_pickle_is_never_run(tmp_path):
    """Case 5.9."""
    marker = tmp_path / "marker"

    class Marker:
        def __reduce__(self):
            return Path.touch, (marker,)

    path = tmp_path / "p.eldr"
    path.write_bytes(pickle.dumps(Marker()))
    with pytest.raises(ProfileError, match="not an eldr profile"):
        Profile.load(path)
    assert not marker.exists()


def test_a_file_beyond_the_limit_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "p.eldr"
    path.write_bytes(make_profile().to_bytes() + b"x" * 1_000)
    size = len(make_profile().to_bytes())
    monkeypatch.setattr(profile_module, "MAX_ARTIFACT_BYTES", size)
    with pytest.raises(ProfileError, match="bytes after the end"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": ()}, "moe_layers must be ascending and not empty"),
        ({"moe_layers": (5, 3, 1)}, "moe_layers must be ascending"),
        ({"top_k": 5}, "top_k must be 1 to experts, 4, got 5"),
        ({"transform": "tf"}, "transform must be one of"),
        ({"layer_mask": ()}, "layer_mask must be ascending positions 0 to 2"),
        ({"layer_mask": (0, 3)}, "layer_mask must be ascending positions 0 to 2"),
        ({"idf": IDF[:2]}, r"idf must be \(3, 4\), got \(2, 4\)"),
        ({"idf": -IDF}, "idf must be finite and not negative"),
        ({"idf": IDF * np.nan}, "idf must be finite and not negative"),
        ({"layer_mask": (0,)}, r"centroids must be \[clusters, 4\], got \(5, 8\)"),
        ({"centroids": CENTROIDS * 2}, "centroid 0 must have norm 1, got 2"),
        ({"centroids": CENTROIDS * np.nan}, "centroid 0 must have norm 1, got nan"),
        ({"centroids": np.zeros((5, 8))}, "centroid 0 must have norm 1, got 0"),
        ({"centroids": CENTROIDS[:4]}, "cluster sizes must be 4, got 5"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, message):
    """Case 3.20: a zero centroid cannot exist."""
    with pytest.raises(ProfileError, match=message):
        make_profile(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "header or arrays lack 'experts'"),
        ({"top_k": "two"}, "header is malformed"),
        ({"clustering": {"sizes": [1]}}, "header is malformed"),
        ({"quality": [{"unknown": 1}]}, "header is malformed"),
        ({"provenance": 3}, "header is malformed"),
        ({"moe_layers": [5, 3, 1]}, "moe_layers must be ascending"),
    ],
)
def test_a_header_of_another_make_is_refused_even_with_a_right_checksum(changes, message):
    artifact = unpack(make_profile().to_bytes())
    header = {key: value for key, value in {**artifact.header, **changes}.items() if value is not None}
    with pytest.raises(ProfileError, match=message):
        Profile.from_bytes(pack(Artifact(header, artifact.arrays)))


def test_a_profile_too_large_to_travel_is_refused(monkeypatch):
    monkeypatch.setattr("eldr.calibration.artifact.MAX_ARTIFACT_BYTES", 100)
    with pytest.raises(ProfileError, match="at most 100 bytes"):
        make_profile().to_bytes()
