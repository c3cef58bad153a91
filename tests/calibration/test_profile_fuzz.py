"""Bytes from anywhere: a profile or a ProfileError, nothing else, and no more memory than the limit."""

import hashlib
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.calibration.artifact import MAGIC, MAX_ARTIFACT_BYTES, MAX_HEADER_BYTES, ArtifactError, pack, unpack
from eldr.calibration.fit_record import ClusterRecord, Provenance, TransformQuality
from eldr.calibration.profile import Profile, ProfileError

PREFIX = struct.Struct("<8sIIQ")
DIGEST_BYTES = 32

PROFILE = Profile(
    fingerprint="model-a",
    moe_layers=(1, 3),
    experts=4,
    top_k=2,
    transform="count-idf",
    idf=np.ones((2, 4), np.float32),
    layer_mask=(0, 1),
    centroids=np.eye(2, 8, dtype=np.float32),
    quality=(TransformQuality("count-idf", 0.8, 0.7, 0.7, (0, 1), (1, 0), (0.6, 0.7)),),
    clustering=ClusterRecord((2, 2), True, 0.9, 7, True, 4),
    provenance=Provenance("ab12", 4, "2026-01-02T03:04:05+00:00", "0.1.0", 3),
)
DATA = PROFILE.to_bytes()
HEADER = json.loads(DATA[PREFIX.size + DIGEST_BYTES :][: PREFIX.unpack_from(DATA)[2]])
BODY = DATA[-4 * (8 + 16) :]


def sealed(header: bytes, body: bytes = BODY) -> bytes:
    """Bytes whose lengths and checksum are right, whatever the header says."""
    prefix = PREFIX.pack(MAGIC, 1, len(header), len(body))
    return prefix + hashlib.sha256(prefix + header + body).digest() + header + body


def with_field(name: str, value: object) -> bytes:
    return sealed(json.dumps(HEADER | {name: value}).encode())


def test_the_header_that_is_bent_below_is_right_as_it_stands():
    assert Profile.from_bytes(sealed(json.dumps(HEADER).encode())).to_bytes() == DATA


@given(st.data())
def test_any_changed_byte_is_refused(data):
    bent = bytearray(DATA)
    bent[data.draw(st.integers(0, len(DATA) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProfileError):
        Profile.from_bytes(bytes(bent))


@given(st.integers(0, len(DATA) - 1))
def test_any_cut_is_refused(length):
    with pytest.raises(ProfileError):
        Profile.from_bytes(DATA[:length])


@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic_word_are_refused(junk):
    with pytest.raises(ProfileError):
        Profile.from_bytes(MAGIC + junk)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(HEADER)), JSON)
def test_any_value_of_any_field_gives_a_profile_or_a_profile_error(name, value):
    try:
        Profile.from_bytes(with_field(name, value))
    except ProfileError:
        return


@settings(max_examples=300)
@given(st.sampled_from(["clustering", "provenance"]), st.data(), JSON)
def test_any_value_inside_a_record_gives_a_writable_profile_or_a_profile_error(record, data, value):
    field = data.draw(st.sampled_from(sorted(HEADER[record])))
    try:
        profile = Profile.from_bytes(with_field(record, HEADER[record] | {field: value}))
    except ProfileError:
        return
    assert Profile.from_bytes(profile.to_bytes()).to_bytes() == profile.to_bytes()


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_header_with_a_right_checksum_is_refused(header):
    with pytest.raises(ProfileError):
        Profile.from_bytes(sealed(header))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"arrays":' * 100_000, "nested too deeply"),
        (b'{"arrays":[],"a":1,"a":2}', "a key is there twice"),
        (b'{"arrays":[["a",[1]],["a",[1]]]}', "a key is there twice"),
        (b'{"arrays":[],"rho":NaN}', "not a finite number"),
        (b'{"arrays":[],"rho":-Infinity}', "not a finite number"),
        (b'{"arrays":[],"rho":1e999}', "not a finite number"),
        (b'{"arrays":[],"experts":' + b"9" * 5_000 + b"}", "header is malformed"),
        (b'{"arrays":[["a",[1e999]]]}', "not a finite number"),
        (b'{"arrays":[["a",[1.0]]]}', "sizes from 1 to"),
        (b'{"arrays":[["a",[true]]]}', "sizes from 1 to"),
        (b'{"arrays":[["a",[0,1000000000000]]]}', "sizes from 1 to"),
        (b'{"arrays":[["a",[33554432,33554432,33554432]]]}', "does not fit the body"),
        (b'{"arrays":[["a",[' + b"1," * 99 + b"1]]]}", "up to 8 sizes"),
        (b'{"arrays":[["a",' + b"[" * 50_000 + b"]" * 50_000 + b"]]}", "nested too deeply"),
        (b"\xff\xfe{}", "header is malformed"),
        (b" " * (MAX_HEADER_BYTES + 1), "a header may have at most"),
    ],
    ids=lambda value: repr(value[:32]),
)
def test_a_header_bomb_is_named_and_takes_no_memory(header, message):
    data = sealed(header)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=message):
            unpack(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_ARTIFACT_BYTES


def test_the_fullest_header_that_is_read_takes_less_memory_than_the_limit():
    header = b'{"x":[' + b"[]," * ((MAX_HEADER_BYTES - 20) // 3) + b"1]}"
    data = sealed(header)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match="header is malformed: 'arrays'"):
            unpack(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_ARTIFACT_BYTES


@pytest.mark.parametrize(
    ("record", "field", "value", "message"),
    [
        ("clustering", "sizes", 3, "sizes must be a list"),
        ("clustering", "sizes", [1.5, 2], "sizes must be ints"),
        ("clustering", "balanced", 1, "balanced must be bool"),
        ("clustering", "objective", "x", "objective must be float"),
        ("provenance", "requests", True, "requests must be int"),
        ("provenance", "created", 7, "created must be str"),
    ],
)
def test_a_record_of_other_types_is_refused_by_field(record, field, value, message):
    with pytest.raises(ProfileError, match=message):
        Profile.from_bytes(with_field(record, HEADER[record] | {field: value}))


@pytest.mark.parametrize(("field", "value"), [("curve", [0.5]), ("mask", []), ("mask", [0, 1, 2])])
def test_quality_figures_that_no_picture_could_show_are_refused(field, value):
    with pytest.raises(ProfileError, match="quality of count-idf"):
        Profile.from_bytes(with_field("quality", [HEADER["quality"][0] | {field: value}]))


def test_nan_is_refused_when_it_is_written():
    with pytest.raises(ArtifactError, match="cannot be written"):
        pack(unpack(DATA).__class__({"rho": float("nan")}, {}))
