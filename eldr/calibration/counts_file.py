"""The counts file: what calibration recorded per request, and what fit, placement and simulation read.

An npz without pickled objects. Keys (N requests, L MoE layers, E experts, k picks, T decode steps):

- `prefill_counts` [N, L, E], `prompt_len` [N]: picks of the prompt's tokens, and how many tokens it has.
- `decode_ids` [N, T, L, k] or `decode_counts` [N, L, E], or both: picks of the generated tokens. `decode_len`
  [N] (optional) says how many of the T steps are real; the rest is ignored.
- `gate_probability`, `gate_logit` float [N, L, E] (optional): sums over the prompt's tokens of the gate's score and
  of its raw logit. The testbed's traces call the first one `prefill_prob`.
- `ids` [N], `domain` [N] text, `fingerprint` text, `top_k`, `moe_layers` [L], `eldr_counts_version`: all
  optional, so that traces of other origin load too. Missing ids become "0", "1", ...; a missing fingerprint
  becomes "", which matches no live model; a missing `top_k` is read off the picks or the sums.

Other keys are ignored.
"""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eldr.calibration.atomic_file import write_atomically
from eldr.calibration.counts import Counts, CountsError, merged, tally

__all__ = [
    "COUNTS_VERSION",
    "MAX_COUNTS_BYTES",
    "Counts",
    "CountsError",
    "load_counts",
    "load_merged",
    "save_counts",
]

COUNTS_VERSION = 1

MAX_COUNTS_BYTES = 8 << 30
"""Largest uncompressed size of the arrays that are read, so that a small file cannot ask for more memory."""

_READ_KEYS = (
    "prefill_counts",
    "prompt_len",
    "decode_ids",
    "decode_len",
    "decode_counts",
    "gate_probability",
    "prefill_prob",
    "gate_logit",
    "ids",
    "domain",
    "fingerprint",
    "top_k",
    "moe_layers",
    "eldr_counts_version",
)


def save_counts(counts: Counts, path: Path) -> None:
    """Writes the file in one step; a reader sees the old content or the new, never a part."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "eldr_counts_version": np.array(COUNTS_VERSION),
        "ids": np.array(counts.ids),
        "domain": np.array(counts.domains),
        "fingerprint": np.array(counts.fingerprint),
        "top_k": np.array(counts.top_k),
        "moe_layers": np.array(counts.moe_layers),
        "prompt_len": counts.prompt_len,
        "prefill_counts": counts.prefill_counts,
        "decode_counts": counts.decode_counts,
    }
    if counts.decode_ids is not None and counts.decode_len is not None:
        arrays["decode_ids"] = counts.decode_ids
        arrays["decode_len"] = counts.decode_len
    for key in ("gate_probability", "gate_logit"):
        sums = getattr(counts, key)
        if sums is not None:
            arrays[key] = sums

    def write(file: BinaryIO) -> None:
        np.savez_compressed(file, allow_pickle=False, **arrays)

    write_atomically(path, write)


def load_counts(path: Path, max_bytes: int = MAX_COUNTS_BYTES) -> Counts:
    """Reads and checks a counts file; nothing in it is ever executed.

    Raises CountsError, naming key and row, for files that are no npz, truncated, damaged, too large, of a
    newer version, with objects inside, or with counts that break the rules of `Counts`.
    """
    if not zipfile.is_zipfile(path):
        raise CountsError(f"{path.name}: not an npz file, or cut off")
    arrays = _read_arrays(path, max_bytes)
    version = int(_scalar(arrays, "eldr_counts_version", COUNTS_VERSION))
    if version > COUNTS_VERSION:
        raise CountsError(f"{path.name}: counts version {version}, this eldr reads up to {COUNTS_VERSION}")
    for key in ("prefill_counts", "prompt_len"):
        if key not in arrays:
            raise CountsError(f"{path.name}: key {key} is missing")
    prefill = arrays["prefill_counts"]
    if prefill.ndim != 3 or 0 in prefill.shape:
        raise CountsError(f"prefill_counts must be [requests, layers, experts], got shape {prefill.shape}")
    requests, layers, experts = prefill.shape
    decode = _decode(arrays, requests, layers, experts)
    return Counts(
        ids=_texts(arrays, "ids", requests) or tuple(str(row) for row in range(requests)),
        domains=_texts(arrays, "domain", requests) or ("",) * requests,
        fingerprint=str(_scalar(arrays, "fingerprint", "")),
        top_k=int(_scalar(arrays, "top_k", 0)) or _top_k(arrays),
        moe_layers=tuple(np.asarray(arrays.get("moe_layers", np.arange(layers))).tolist()),
        prompt_len=arrays["prompt_len"],
        prefill_counts=prefill,
        decode_counts=decode.counts,
        decode_ids=decode.ids,
        decode_len=decode.length,
        gate_probability=arrays.get("gate_probability", arrays.get("prefill_prob")),
        gate_logit=arrays.get("gate_logit"),
    )


def load_merged(paths: Sequence[Path], max_bytes: int = MAX_COUNTS_BYTES) -> Counts:
    """Several counts files as one, `max_bytes` over all together. Raises CountsError that names the file."""
    parts: list[Counts] = []
    for path in paths:
        try:
            parts.append(load_counts(path, max_bytes))
        except CountsError as error:
            named = str(error).startswith(f"{path.name}:") or len(paths) == 1
            raise CountsError(str(error) if named else f"{path.name}: {error}") from error
        max_bytes -= sum(
            array.nbytes
            for array in (parts[-1].prefill_counts, parts[-1].decode_counts, parts[-1].decode_ids)
            if array is not None
        )
    try:
        return merged(parts)
    except CountsError as error:
        names = ", ".join(f"{number} {path.name}" for number, path in enumerate(paths, start=1))
        raise CountsError(f"{error} (parts: {names})") from error


def _read_arrays(path: Path, max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}
    key = ""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        wanted = [key for key in _READ_KEYS if f"{key}.npy" in sizes]
        total = sum(sizes[f"{key}.npy"] for key in wanted)
        if total > max_bytes:
            raise CountsError(f"{path.name}: holds {total} bytes, at most {max_bytes} are read")
        with np.load(path, allow_pickle=False) as archive:
            for key in wanted:
                arrays[key] = archive[key]
    except CountsError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
        where = f" at key {key}" if key else ""
        raise CountsError(f"{path.name}: cannot be read{where}: {error}") from error
    return arrays


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    counts: npt.NDArray[Any]
    ids: npt.NDArray[Any] | None = None
    length: npt.NDArray[Any] | None = None


def _decode(arrays: Mapping[str, npt.NDArray[Any]], requests: int, layers: int, experts: int) -> _Decode:
    ids, stored = arrays.get("decode_ids"), arrays.get("decode_counts")
    if ids is None:
        if stored is None:
            raise CountsError("decode_ids or decode_counts must be there, neither is")
        return _Decode(stored)
    if ids.ndim != 4 or ids.shape[0] != requests or ids.shape[2] != layers or ids.dtype.kind not in "ui":
        raise CountsError(
            f"decode_ids must be integers [{requests} requests, steps, {layers} layers, top_k], "
            f"got {ids.dtype} {ids.shape}"
        )
    length = arrays.get("decode_len", np.full(requests, ids.shape[1], dtype=np.int64))
    counts = tally(ids, length, experts)
    if stored is not None:
        if stored.shape != counts.shape:
            raise CountsError(f"decode_counts are {stored.shape}, expected {counts.shape}")
        differ = np.flatnonzero((stored != counts).any(axis=(1, 2)))
        if differ.size:
            raise CountsError(f"row {differ[0]}: decode_counts are not the sums of decode_ids")
    return _Decode(counts, ids, length)


def _top_k(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """From the picks of a decode step, else from the first prompt; `Counts` then checks every row against it."""
    if "decode_ids" in arrays:
        return int(arrays["decode_ids"].shape[3])
    tokens = int(np.asarray(arrays["prompt_len"]).flat[0])
    picks = int(arrays["prefill_counts"][0, 0].sum())
    if tokens < 1 or picks % tokens:
        raise CountsError(f"row 0: {picks} picks in layer 0 are no multiple of prompt_len {tokens}")
    return picks // tokens


def _scalar(arrays: Mapping[str, npt.NDArray[Any]], key: str, default: str | int) -> Any:
    value = arrays.get(key)
    if value is None:
        return default
    kinds = "U" if isinstance(default, str) else "ui"
    if value.shape != () or value.dtype.kind not in kinds:
        expected = "a text" if kinds == "U" else "an integer"
        raise CountsError(f"{key} must be {expected}, got {value.dtype} {value.shape}")
    return value.item()


def _texts(arrays: Mapping[str, npt.NDArray[Any]], key: str, requests: int) -> tuple[str, ...]:
    value = arrays.get(key)
    if value is None:
        return ()
    if value.shape != (requests,) or value.dtype.kind != "U":
        raise CountsError(f"{key} must be {requests} texts, got {value.dtype} {value.shape}")
    return tuple(value.tolist())
