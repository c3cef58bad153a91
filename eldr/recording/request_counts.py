"""What was counted of one request, its two legs joined, and many of them as the arrays of a counts file.

A position of the sequence has one owner: prompt tokens are prefill's, whose signature follows the KV that a decoder
takes over, generated tokens are the decoder's. A decoder runs the last prompt token again and may hold blocks of the
prompt itself; it counts neither (case 1.16).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts, GateArray
from eldr.signature.expert_signature import ExpertSignature

_MODEL = ("fingerprint", "shape", "top_k")


class RequestCountsError(ValueError):
    """Counts that are no whole request; the message names the request and what is wrong."""


class PartialCountsError(RequestCountsError):
    """Some tokens' picks are unknown, because their KV came from elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class GateSums:
    """Sums over a prompt's tokens of the gate's score and of its raw logit, both float32 [layers, experts]."""

    probability: GateArray
    logit: GateArray


@dataclass(frozen=True, slots=True, eq=False)
class RequestCounts:
    """Counts of one request that ended well, every token covered.

    `decode` is None where no generated token was run: with max_tokens = 1, or an end token at once, the request is
    complete after the prefill leg's token (case 1.14). Counts of no token are taken as None.
    Raises RequestCountsError where the legs are of different models, and PartialCountsError where a leg does not
    cover all of its tokens.
    """

    id: str
    prefill: ExpertSignature
    decode: ExpertSignature | None
    domain: str = ""
    gate: GateSums | None = None

    def __post_init__(self) -> None:
        if self.decode is not None and not self.decode.tokens:
            object.__setattr__(self, "decode", None)
        for leg in ("prefill", "decode"):
            signature: ExpertSignature | None = getattr(self, leg)
            if signature is not None and signature.covered_tokens != signature.tokens:
                raise PartialCountsError(
                    f"{leg} counts of {self.id!r} cover {signature.covered_tokens} of {signature.tokens} tokens"
                )
        if not self.prefill.tokens:
            raise RequestCountsError(f"prefill counts of {self.id!r} are of no token")
        if self.decode is not None:
            require_same_model(self.prefill, self.decode, f"decode counts of {self.id!r}")


def require_same_model(first: ExpertSignature, other: ExpertSignature, what: str) -> None:
    """Raises RequestCountsError that names the field and both values."""
    for name in _MODEL:
        mine, theirs = getattr(first, name), getattr(other, name)
        if mine != theirs:
            raise RequestCountsError(f"{what}: {name} is {theirs}, expected {mine}")


def counts_of(rows: Sequence[RequestCounts], moe_layers: tuple[int, ...] | None = None) -> Counts:
    """The requests in their order. `moe_layers` are 0, 1, ... where they are unknown.

    Gate sums are there where every request has them. A request that decoded nothing has zero decode counts, whose
    decode_tokens say so. Raises RequestCountsError where the requests are of different models, CountsError where an
    id comes twice.
    """
    if not rows:
        raise RequestCountsError("there is no request")
    first = rows[0].prefill
    for row in rows[1:]:
        require_same_model(first, row.prefill, f"prefill counts of {row.id!r}")
    nothing: npt.NDArray[np.uint32] = np.zeros(first.shape, np.uint32)
    gates = [row.gate for row in rows if row.gate is not None]
    whole = len(gates) == len(rows)
    return Counts(
        ids=tuple(row.id for row in rows),
        fingerprint=first.fingerprint,
        top_k=first.top_k,
        moe_layers=moe_layers or tuple(range(first.shape[0])),
        prompt_len=np.array([row.prefill.tokens for row in rows]),
        prefill_counts=np.stack([row.prefill.counts for row in rows]),
        decode_counts=np.stack([nothing if row.decode is None else row.decode.counts for row in rows]),
        domains=tuple(row.domain for row in rows),
        gate_probability=np.stack([gate.probability for gate in gates]) if whole else None,
        gate_logit=np.stack([gate.logit for gate in gates]) if whole else None,
    )
