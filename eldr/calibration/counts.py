"""Expert counts of calibration requests, prefill and decode, checked row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CountArray = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
GateArray = npt.NDArray[np.float32]

_TALLY_ROWS = 64
_ARRAYS = (
    "prefill_counts",
    "decode_counts",
    "prompt_len",
    "decode_ids",
    "decode_len",
    "gate_probability",
    "gate_logit",
)


class CountsError(ValueError):
    """Counts that cannot be what a model picked; the message names the row."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """N requests over L MoE layers of E experts, top-`top_k`; arrays are read-only.

    `prefill_counts` [N, L, E] sum to `prompt_len` * top_k in every layer. `decode_counts` [N, L, E] sum, per
    request, to the same multiple of top_k in every layer; a request that generated nothing has zeros.
    `decode_ids` [N, T, L, k], with `decode_len` [N] valid steps, where single steps are known. Counts are
    kept in the narrowest unsigned integer that holds the largest.
    `gate_probability` and `gate_logit`, float32 [N, L, E], are sums over the prompt's tokens of what the gate gave
    each expert, as a score and before its scoring function, where the capture was asked for them.
    `fingerprint` is "" where the origin is unknown, `domains` are "" where unlabelled.

    Raises CountsError for wrong shapes, and naming row and id for: equal ids, values that are negative,
    fractional or not finite, and sums that break conservation, with the layer.
    """

    ids: tuple[str, ...]
    fingerprint: str
    top_k: int
    moe_layers: tuple[int, ...]
    prompt_len: IntArray
    prefill_counts: CountArray
    decode_counts: CountArray
    domains: tuple[str, ...] = ()
    decode_ids: CountArray | None = None
    decode_len: IntArray | None = None
    gate_probability: GateArray | None = None
    gate_logit: GateArray | None = None

    def __post_init__(self) -> None:
        self._check_header()
        shape = self.prefill_counts.shape
        for name in ("prefill_counts", "decode_counts"):
            object.__setattr__(self, name, self._whole(name, shape))
        for name in ("prompt_len", "decode_len"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._whole(name, shape[:1]).astype(np.int64))
        self._check_prefill()
        self._check_decode()
        for name in ("gate_probability", "gate_logit"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._gate_sums(name, shape))
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                view = array.view()
                view.setflags(write=False)
                object.__setattr__(self, name, view)

    @property
    def requests(self) -> int:
        """N."""
        return len(self.ids)

    @property
    def layers(self) -> int:
        """L."""
        return int(self.prefill_counts.shape[1])

    @property
    def experts(self) -> int:
        """E."""
        return int(self.prefill_counts.shape[2])

    @property
    def decode_tokens(self) -> IntArray:
        """Generated tokens per request, int64 [N]."""
        tokens: IntArray = self.decode_counts[:, 0].sum(axis=1, dtype=np.int64) // self.top_k
        return tokens

    def _check_header(self) -> None:
        shape = self.prefill_counts.shape
        if len(shape) != 3 or 0 in shape:
            raise CountsError(f"prefill_counts must be [requests, layers, experts], got shape {shape}")
        requests, layers, experts = shape
        if not 1 <= self.top_k <= experts:
            raise CountsError(f"top_k must be 1 to {experts}, got {self.top_k}")
        if len(self.moe_layers) != layers or list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise CountsError(f"moe_layers must be {layers} ascending indices, got {self.moe_layers}")
        if len(self.ids) != requests:
            raise CountsError(f"ids must be {requests}, got {len(self.ids)}")
        first: dict[str, int] = {}
        for row, request_id in enumerate(self.ids):
            if request_id in first:
                raise CountsError(f"row {row}: id {request_id!r} is already that of row {first[request_id]}")
            first[request_id] = row
        if not self.domains:
            object.__setattr__(self, "domains", ("",) * requests)
        if len(self.domains) != requests:
            raise CountsError(f"domains must be {requests}, got {len(self.domains)}")

    def _whole(self, name: str, shape: tuple[int, ...]) -> CountArray:
        """The field as narrow unsigned integers of this shape."""
        array: CountArray = np.asarray(getattr(self, name))
        if array.shape != shape:
            raise CountsError(f"{name} must have shape {shape}, got {array.shape}")
        if array.dtype.kind not in "uif":
            raise CountsError(f"{name} must be numbers, got {array.dtype}")
        if array.dtype.kind == "f":
            self._refuse(~np.isfinite(array), f"{name} are not finite")
            self._refuse(array != np.floor(array), f"{name} are not whole numbers")
        if array.dtype.kind != "u":
            self._refuse(array < 0, f"{name} are negative")
        largest = array.max()
        if largest > np.iinfo(np.uint32).max:
            raise CountsError(f"{name} must fit 32 bits, got {largest}")
        return array.astype(np.min_scalar_type(int(largest)))

    def _gate_sums(self, name: str, shape: tuple[int, ...]) -> GateArray:
        array: CountArray = np.asarray(getattr(self, name))
        if array.shape != shape or array.dtype.kind != "f":
            raise CountsError(f"{name} must be floats of shape {shape}, got {array.dtype} {array.shape}")
        self._refuse(~np.isfinite(array), f"{name} are not finite")
        if name == "gate_probability":
            self._refuse(array < 0, f"{name} are negative")
        return array.astype(np.float32)

    def _refuse(self, bad: npt.NDArray[np.bool_], what: str) -> None:
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
        if rows.size:
            raise CountsError(f"row {rows[0]} (id {self.ids[rows[0]]!r}): {what} ({rows.size} such rows)")

    def _check_prefill(self) -> None:
        self._refuse(self.prompt_len < 1, "prompt_len is below 1")
        sums = self.prefill_counts.sum(axis=2, dtype=np.int64)
        wrong = sums != (self.prompt_len * self.top_k)[:, None]
        if wrong.any():
            row, layer = (int(index) for index in np.argwhere(wrong)[0])
            raise CountsError(
                f"row {row} (id {self.ids[row]!r}): prefill_counts of layer {layer} sum to {sums[row, layer]}, "
                f"expected prompt_len * top_k = {self.prompt_len[row]} * {self.top_k} "
                f"({int(wrong.any(axis=1).sum())} such rows)"
            )

    def _check_decode(self) -> None:
        sums = self.decode_counts.sum(axis=2, dtype=np.int64)
        wrong = (sums != sums[:, :1]) | (sums % self.top_k != 0)
        if wrong.any():
            row, layer = (int(index) for index in np.argwhere(wrong)[0])
            raise CountsError(
                f"row {row} (id {self.ids[row]!r}): decode_counts of layer {layer} sum to {sums[row, layer]}, "
                f"those of layer 0 to {sums[row, 0]}; all must be one multiple of top_k {self.top_k} "
                f"({int(wrong.any(axis=1).sum())} such rows)"
            )
        if (self.decode_ids is None) != (self.decode_len is None):
            raise CountsError("decode_ids and decode_len must be given together")
        if self.decode_ids is None or self.decode_len is None:
            return
        ids = self.decode_ids
        if ids.ndim != 4 or (ids.shape[0], *ids.shape[2:]) != (self.requests, self.layers, self.top_k):
            raise CountsError(
                f"decode_ids must be [{self.requests}, steps, {self.layers}, {self.top_k}], got {ids.shape}"
            )
        self._refuse(self.decode_len != self.decode_tokens, "decode_len is not the tokens of decode_counts")


def tally(ids: CountArray, length: CountArray, experts: int) -> CountArray:
    """Counts uint32 [N, L, E] of picks [N, T, L, k], the first `length` [N] of the T steps of each request.

    Raises CountsError, naming the row, for a length outside 0 to T and for ids outside 0 to E - 1.
    """
    requests, steps, layers, _ = ids.shape
    if length.shape != (requests,) or length.dtype.kind not in "ui":
        raise CountsError(f"decode_len must be {requests} integers, got {length.dtype} {length.shape}")
    bad = np.flatnonzero((length < 0) | (length > steps))
    if bad.size:
        raise CountsError(f"row {bad[0]}: decode_len must be 0 to {steps}, got {length[bad[0]]}")
    counts = np.empty((requests, layers, experts), dtype=np.uint32)
    for start in range(0, requests, _TALLY_ROWS):
        part = ids[start : start + _TALLY_ROWS].astype(np.int64)
        real = np.arange(steps) < length[start : start + _TALLY_ROWS, None]
        outside = ((part < 0) | (part >= experts)) & real[:, :, None, None]
        wrong = np.flatnonzero(outside.any(axis=(1, 2, 3)))
        if wrong.size:
            raise CountsError(f"row {start + wrong[0]}: decode_ids are not all 0 to {experts - 1}")
        cell = (np.arange(len(part))[:, None, None, None] * layers + np.arange(layers)[:, None]) * experts
        picked = (part + cell)[real]
        counts[start : start + len(part)] = np.bincount(
            picked.ravel(), minlength=len(part) * layers * experts
        ).reshape(-1, layers, experts)
    return counts


def merged(parts: Sequence[Counts]) -> Counts:
    """The requests of all parts in their order, without single decode steps; gate sums where every part has them.

    Raises CountsError, naming the part's number, where a part is of another model, and for an id that comes twice.
    """
    if not parts:
        raise CountsError("there are no counts to merge")
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for number, part in enumerate(parts[1:], start=2):
        for name in ("fingerprint", "top_k", "moe_layers", "experts"):
            if getattr(part, name) != getattr(first, name):
                raise CountsError(
                    f"part {number} has {name} {getattr(part, name)!r}, part 1 has {getattr(first, name)!r}"
                )

    def joined(name: str) -> CountArray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    return Counts(
        ids=tuple(request_id for part in parts for request_id in part.ids),
        fingerprint=first.fingerprint,
        top_k=first.top_k,
        moe_layers=first.moe_layers,
        prompt_len=np.concatenate([part.prompt_len for part in parts]),
        prefill_counts=np.concatenate([part.prefill_counts for part in parts]),
        decode_counts=np.concatenate([part.decode_counts for part in parts]),
        domains=tuple(domain for part in parts for domain in part.domains),
        gate_probability=joined("gate_probability"),
        gate_logit=joined("gate_logit"),
    )
