import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.calibration import artifact
from eldr.calibration.artifact import Artifact, ArtifactError, pack, unpack

SMALL = Artifact({"name": "größe", "list": [1, 2]}, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
FIXED = 56


def resealed(data: bytes, header: bytes) -> bytes:
    """The artifact with another header and a checksum that matches."""
    _, version, header_bytes, body_bytes = struct.unpack_from("<8sIIQ", data)
    prefix = struct.pack("<8sIIQ", artifact.MAGIC, version, len(header), body_bytes)
    body = data[FIXED + header_bytes :]
    return prefix + hashlib.sha256(prefix + header + body).digest() + header + body


def test_what_is_packed_is_unpacked():
    again = unpack(pack(SMALL))
    assert again.header == SMALL.header
    assert np.array_equal(again.arrays["a"], SMALL.arrays["a"])


def test_equal_content_gives_equal_bytes_whatever_the_order_of_keys():
    other = Artifact(dict(reversed(SMALL.header.items())), SMALL.arrays)
    assert pack(other) == pack(SMALL)


@given(st.integers(0, len(pack(SMALL)) - 1), st.integers(1, 255))
def test_a_changed_byte_is_always_noticed(position, change):
    data = bytearray(pack(SMALL))
    data[position] ^= change
    with pytest.raises(ArtifactError):
        unpack(bytes(data))


@given(st.integers(8, len(pack(SMALL)) - 1))
def test_a_truncated_artifact_is_called_so(length):
    with pytest.raises(ArtifactError, match="truncated"):
        unpack(pack(SMALL)[:length])


def test_each_kind_of_wrong_bytes_has_its_own_message():
    data = pack(SMALL)
    newer = data[:8] + struct.pack("<I", 2) + data[12:]
    for wrong, message in [
        (b"", "not an eldr profile"),
        (b"PK\x03\x04" + data, "not an eldr profile: it begins with"),
        (newer, "profile format 2, this eldr reads format 1"),
        (data + b"x", "bytes after the end"),
        (data[:-1] + b"x", "checksum does not match"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            unpack(wrong)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"arrays": 3}',
        b'{"arrays": [["a", ["x"]]]}',
        b'{"arrays": [["a", [-1]]]}',
        b'{"arrays": [["a", [7]]]}',
        b'{"arrays": [["a", [5]]]}',
    ],
)
def test_a_header_that_makes_no_sense_is_refused_even_with_a_right_checksum(header):
    with pytest.raises(ArtifactError):
        unpack(resealed(pack(SMALL), header))


def test_artifacts_beyond_the_limit_are_neither_written_nor_read(monkeypatch):
    data = pack(SMALL)
    monkeypatch.setattr(artifact, "MAX_ARTIFACT_BYTES", len(data) - 1)
    with pytest.raises(ArtifactError, match=f"at most {len(data) - 1} bytes, this one has {len(data)}"):
        pack(SMALL)
    with pytest.raises(ArtifactError, match="this one is larger"):
        unpack(data)


def test_nan_never_enters_a_header():
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack(Artifact({"rho": float("nan")}, {}))


def test_the_header_is_plain_json():
    data = pack(SMALL)
    (header_bytes,) = struct.unpack_from("<I", data, 12)
    assert json.loads(data[FIXED : FIXED + header_bytes])["name"] == "größe"
