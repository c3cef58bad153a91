"""The container of a profile: a JSON header and float32 arrays behind a magic word, a version and a checksum.

Layout, little-endian: magic (8 bytes), format version u32, header length u32, body length u64, SHA-256 of all
other bytes (32), header (UTF-8 JSON, sorted keys), body (the arrays, row-major, in header order). Nothing in
it is executed, and equal content gives equal bytes.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"ELDRPROF"
FORMAT_VERSION = 1
MAX_ARTIFACT_BYTES = 32 << 20
"""Largest artifact that is read or written; it travels in one gRPC message."""
MAX_HEADER_BYTES = 1 << 20
"""Largest header; parsed JSON takes up to about 25 times its text, which stays below MAX_ARTIFACT_BYTES."""
MAX_DIMENSIONS = 8

_PREFIX = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32
_FIXED_BYTES = _PREFIX.size + _DIGEST_BYTES


class ArtifactError(ValueError):
    """Bytes that are no artifact of this version."""


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A header and named float32 arrays."""

    header: Mapping[str, Any]
    arrays: Mapping[str, npt.NDArray[np.float32]]


def pack(artifact: Artifact) -> bytes:
    """The artifact as bytes; raises ArtifactError where it would be too large or its header is no JSON (NaN)."""
    arrays = {name: np.ascontiguousarray(array, dtype="<f4") for name, array in artifact.arrays.items()}
    shapes = [[name, list(array.shape)] for name, array in arrays.items()]
    try:
        header = json.dumps(
            {**artifact.header, "arrays": shapes},
            sort_keys=True,
            allow_nan=False,
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()
    except ValueError as error:
        raise ArtifactError(f"header cannot be written: {error}") from error
    body = b"".join(array.tobytes() for array in arrays.values())
    size = _FIXED_BYTES + len(header) + len(body)
    if size > MAX_ARTIFACT_BYTES:
        raise ArtifactError(f"a profile may have at most {MAX_ARTIFACT_BYTES} bytes, this one has {size}")
    _check_header_bytes(len(header))
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), len(body))
    return prefix + _digest(prefix, header, body) + header + body


def unpack(data: bytes) -> Artifact:
    """Inverse of `pack`; raises ArtifactError for foreign, newer, truncated, tampered and oversized bytes."""
    if data[: len(MAGIC)] != MAGIC:
        raise ArtifactError(f"not an eldr profile: it begins with {data[: len(MAGIC)]!r}, not {MAGIC!r}")
    if len(data) > MAX_ARTIFACT_BYTES:
        raise ArtifactError(f"a profile may have at most {MAX_ARTIFACT_BYTES} bytes, this one is larger")
    if len(data) < _FIXED_BYTES:
        raise ArtifactError(f"truncated: {len(data)} bytes, the fixed part alone has {_FIXED_BYTES}")
    _, version, header_bytes, body_bytes = _PREFIX.unpack_from(data)
    if version != FORMAT_VERSION:
        raise ArtifactError(f"profile format {version}, this eldr reads format {FORMAT_VERSION}; fit again")
    expected = _FIXED_BYTES + header_bytes + body_bytes
    if len(data) != expected:
        kind = "truncated" if len(data) < expected else "bytes after the end"
        raise ArtifactError(f"{kind}: {len(data)} bytes, the profile says {expected}")
    _check_header_bytes(header_bytes)
    header = data[_FIXED_BYTES : _FIXED_BYTES + header_bytes]
    body = memoryview(data)[_FIXED_BYTES + header_bytes :]
    if _digest(data[: _PREFIX.size], header, body) != data[_PREFIX.size : _FIXED_BYTES]:
        raise ArtifactError("checksum does not match: the profile was changed or damaged")
    return _parse(header, body)


def _check_header_bytes(size: int) -> None:
    if size > MAX_HEADER_BYTES:
        raise ArtifactError(f"a header may have at most {MAX_HEADER_BYTES} bytes, this one has {size}")


def _digest(prefix: bytes, header: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(prefix)
    digest.update(header)
    digest.update(body)
    return digest.digest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key is there twice")
    return fields


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:32]} is not a finite number")
    return value


def _shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Takes `arrays` out of the header; raises ValueError, TypeError, KeyError."""
    entries = [(name, tuple(shape)) for name, shape in fields.pop("arrays")]
    for name, shape in entries:
        sizes = all(type(size) is int and 0 < size <= MAX_ARTIFACT_BYTES for size in shape)
        if not isinstance(name, str) or not sizes or len(shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"arrays must be names with up to {MAX_DIMENSIONS} sizes from 1 to {MAX_ARTIFACT_BYTES}"
            )
    return _object(entries)


def _parse(header: bytes, body: memoryview) -> Artifact:
    try:
        fields = json.loads(header, object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)
        shapes = _shapes(fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(f"header is malformed: {error}") from error
    except RecursionError as error:
        raise ArtifactError("header is malformed: nested too deeply") from error
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    start = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if start + 4 * size > len(body):
            raise ArtifactError(f"array {name} of shape {shape} does not fit the body")
        arrays[name] = np.frombuffer(body, "<f4", size, start).reshape(shape).astype(np.float32)
        start += 4 * size
    if start != len(body):
        raise ArtifactError(f"body has {len(body)} bytes, the arrays {start}")
    return Artifact(fields, arrays)
