"""Function-preserving inflation of a Qwen3-MoE checkpoint: zero-pads every expert's width.

Gate and up projections gain zero rows and the down projection zero columns at the end, so an added unit
computes silu(0) * 0 = 0. Router, attention and embeddings are untouched, so picks and outputs stay the same;
only the bytes that a step reads for each active expert grow.

    python inflate.py SOURCE TARGET --width 1024 [--dtype float32] [--verify]
"""

import argparse
import errno
import hashlib
import json
import math
import os
import re
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WEIGHTS = "model.safetensors"
MARKER = "inflation.json"
WIDTH_MULTIPLE = 32
"""vLLM's grouped matrix product on the CPU wants expert widths that are multiples of this."""

ROWS = re.compile(r"\.mlp\.experts\.\d+\.(gate|up)_proj\.weight$")
COLUMNS = re.compile(r"\.mlp\.experts\.\d+\.down_proj\.weight$")

STORED = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
"""safetensors dtype to the numpy dtype that holds its bits; numpy has no bfloat16."""
DTYPES = {"bfloat16": "BF16", "float32": "F32"}

Array = npt.NDArray[Any]


class InflationError(ValueError):
    """A checkpoint or a width that cannot be inflated, or a target that is not what it should be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file; `offset` counts from the file's beginning, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * STORED[self.dtype].itemsize


def read_entries(path: Path) -> list[Entry]:
    """The tensors of a safetensors file in the order of their bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = [
        Entry(name, field["dtype"], tuple(field["shape"]), 8 + length + field["data_offsets"][0])
        for name, field in header.items()
    ]
    for entry in entries:
        if entry.dtype not in STORED:
            raise InflationError(f"{path}: {entry.name} is {entry.dtype}, known are {', '.join(STORED)}")
    return sorted(entries, key=lambda entry: entry.offset)


def read_tensor(path: Path, entry: Entry) -> Array:
    """The stored bits of one tensor, in its shape."""
    with path.open("rb") as file:
        file.seek(entry.offset)
        raw = file.read(entry.size_bytes)
    return np.frombuffer(raw, STORED[entry.dtype]).reshape(entry.shape)


def padded_shape(name: str, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Shape after inflation: experts' projections grow to `width`, everything else keeps its shape."""
    if ROWS.search(name):
        return (width, *shape[1:])
    if COLUMNS.search(name):
        return (*shape[:-1], width)
    return shape


def padded(tensor: Array, shape: tuple[int, ...]) -> Array:
    """`tensor` in the first corner of zeros of `shape`."""
    if tensor.shape == shape:
        return tensor
    out = np.zeros(shape, tensor.dtype)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


def converted(tensor: Array, dtype: str, wanted: str) -> Array:
    """Bits of `dtype` as bits of `wanted`. Widening is exact; a narrowing that is not exact is refused."""
    if dtype == wanted:
        return tensor
    if wanted == "F32":
        return (tensor.astype("<u4") << 16).view("<f4")
    bits = tensor.view("<u4")
    if (bits & 0xFFFF).any():
        raise InflationError("float32 weights do not fit bfloat16 exactly; keep --dtype float32")
    return (bits >> 16).astype("<u2")


def inflate(source: Path, target: Path, width: int, dtype: str | None = None) -> Path:
    """Writes the inflated copy of `source` at `target` and returns it; a complete one is kept.

    `dtype` is the dtype of the file ("float32", "bfloat16"; None keeps the source's). Raises InflationError
    where the width does not fit the checkpoint or `target` holds something else.
    """
    config = json.loads((source / "config.json").read_text())
    old = config["moe_intermediate_size"]
    if width < old or width % WIDTH_MULTIPLE:
        raise InflationError(f"width must be a multiple of {WIDTH_MULTIPLE} of at least {old}, got {width}")
    if dtype is not None and dtype not in DTYPES:
        raise InflationError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not (source / WEIGHTS).is_file():
        raise InflationError(f"{source} has no {WEIGHTS}; sharded checkpoints are not supported")
    marker = {"source_sha256": sha256(source / WEIGHTS), "width": width, "dtype": dtype or "source"}
    if target.exists():
        require_marker(target, marker)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for file in source.iterdir():
            if file.name not in (WEIGHTS, "config.json"):
                shutil.copyfile(file, partial / file.name)
        write_weights(source / WEIGHTS, partial / WEIGHTS, width, dtype)
        config["moe_intermediate_size"] = width
        if dtype is not None:
            config["dtype"] = dtype
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        partial.chmod(0o755)
        try:
            os.rename(partial, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            require_marker(target, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def write_weights(source: Path, target: Path, width: int, dtype: str | None) -> None:
    """Writes the inflated safetensors file, one tensor at a time."""
    entries = read_entries(source)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        stored = DTYPES[dtype] if dtype else entry.dtype
        shape = padded_shape(entry.name, entry.shape, width)
        size = math.prod(shape) * STORED[stored].itemsize
        header[entry.name] = {
            "dtype": stored,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            field = header[entry.name]
            tensor = converted(read_tensor(source, entry), entry.dtype, field["dtype"])
            file.write(padded(tensor, tuple(field["shape"])).tobytes())


def verify(source: Path, target: Path) -> int:
    """Reads every weight back: originals in place, zeros elsewhere. Returns the number of tensors.

    Raises InflationError naming the first tensor that differs. With zeros in gate, up and down projection the
    added units contribute nothing, whatever the input.
    """
    width = json.loads((target / "config.json").read_text())["moe_intermediate_size"]
    written = {entry.name: entry for entry in read_entries(target / WEIGHTS)}
    entries = read_entries(source / WEIGHTS)
    if written.keys() != {entry.name for entry in entries}:
        raise InflationError(f"{target} and {source} hold different tensors")
    for entry in entries:
        copy = written[entry.name]
        expected = converted(read_tensor(source / WEIGHTS, entry), entry.dtype, copy.dtype)
        expected = padded(expected, padded_shape(entry.name, entry.shape, width))
        if not np.array_equal(expected, read_tensor(target / WEIGHTS, copy)):
            raise InflationError(f"{target}: {entry.name} is not the padded original")
    return len(entries)


def require_marker(target: Path, marker: dict[str, Any]) -> None:
    """Raises InflationError where `target` is not the complete result of the same inflation."""
    path = target / MARKER
    found = json.loads(path.read_text()) if path.is_file() else None
    if found != marker:
        raise InflationError(f"{target} exists and holds {found}, expected {marker}; choose another folder")


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of the checkpoint")
    parser.add_argument("target", type=Path, help="folder to write; kept where it is complete")
    parser.add_argument("--width", type=int, default=1024, help="width of every expert (default 1024)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="dtype of the file (default: the source's)")
    parser.add_argument("--verify", action="store_true", help="read every weight back")
    options = parser.parse_args()
    try:
        target = inflate(options.source, options.target, options.width, options.dtype)
        print(f"{target}: {(target / WEIGHTS).stat().st_size} bytes")
        if options.verify:
            print(f"{verify(options.source, target)} tensors are the padded originals")
    except (InflationError, OSError) as error:
        sys.exit(f"inflate: {error}")


if __name__ == "__main__":
    main()
