"""How often the tokens of one prompt selected each expert (paper section 3, `c[l, e]`)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.signature.geometry import ModelGeometry

_BYTES, _LARGEST = 4, (1 << 32) - 1
"""Of the unsigned integers that counts are kept in."""


class SignatureError(ValueError):
    """Counts that cannot be the picks of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertSignature:
    """Expert counts of a prompt, uint32 [layers, experts], read-only.

    Invariant: every layer sums to `covered_tokens * top_k`. `covered_tokens < tokens` says that the KV of
    some tokens came from elsewhere, so that their picks are unknown; they are never filled with zeros.
    Raises SignatureError where the counts break this.
    """

    fingerprint: str
    top_k: int
    tokens: int
    covered_tokens: int
    counts: npt.NDArray[np.uint32]

    def __post_init__(self) -> None:
        raw = np.asarray(self.counts)
        if raw.ndim != 2 or 0 in raw.shape:
            raise SignatureError(f"counts must be [layers, experts], got shape {raw.shape}")
        if raw.dtype.kind == "f" and not np.isfinite(raw).all():
            raise SignatureError("counts must be finite")
        if raw.dtype.kind not in "ui":
            raise SignatureError(f"counts must be integers, got {raw.dtype}")
        if raw.dtype.kind == "i" and raw.min() < 0:
            raise SignatureError(f"counts must not be negative, got {raw.min()}")
        if raw.dtype.itemsize > _BYTES and raw.max() > _LARGEST:
            raise SignatureError(f"counts must fit 32 bits, got {raw.max()}")
        if not 0 <= self.covered_tokens <= self.tokens:
            raise SignatureError(f"covered_tokens must be 0 to {self.tokens}, got {self.covered_tokens}")
        counts = np.array(raw, dtype=np.uint32, order="C")
        # Narrow sums are quicker; a row of narrow counts cannot overflow them.
        narrow = raw.dtype.itemsize <= _BYTES // 2 and raw.shape[1] <= 1 << 16
        sums = counts.sum(axis=1, dtype=np.uint32 if narrow else np.int64)
        wrong = sums != self.covered_tokens * self.top_k
        if np.count_nonzero(wrong):
            wrong = np.flatnonzero(wrong)
            raise SignatureError(
                f"layer {wrong[0]} sums to {sums[wrong[0]]}, expected covered_tokens * top_k = "
                f"{self.covered_tokens} * {self.top_k} = {self.covered_tokens * self.top_k}"
            )
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    @property
    def shape(self) -> tuple[int, int]:
        """[layers, experts]."""
        return self.counts.shape[0], self.counts.shape[1]

    @property
    def coverage(self) -> float:
        """Share of the prompt's tokens whose picks are known, 0 to 1."""
        return self.covered_tokens / self.tokens if self.tokens else 0.0

    def shares(self) -> npt.NDArray[np.float32]:
        """Probability that a decode step of this request touches each expert, min(1, counts / tokens).

        float32 [layers, experts]; all zero where no token is covered.
        """
        # Signed integers convert at once, unsigned ones do not; every count fits both.
        signed = self.covered_tokens * self.top_k < 1 << 31
        out: npt.NDArray[np.float32] = (self.counts.view(np.int32) if signed else self.counts).astype(
            np.float32
        )
        out *= np.float32(1.0 / max(1, self.covered_tokens))
        # Only picks that name an expert twice can exceed the tokens.
        return np.minimum(out, np.float32(1.0), out=out) if self.counts.max() > self.covered_tokens else out

    def require_geometry(self, geometry: ModelGeometry) -> None:
        """Raises SignatureError where the signature is not of this model, naming both values."""
        if self.fingerprint != geometry.fingerprint:
            raise SignatureError(f"fingerprint is {self.fingerprint}, expected {geometry.fingerprint}")
        if self.shape != geometry.shape:
            raise SignatureError(f"counts are {self.shape}, expected {geometry.shape} [layers, experts]")
        if self.top_k != geometry.top_k:
            raise SignatureError(f"top_k is {self.top_k}, expected {geometry.top_k}")
