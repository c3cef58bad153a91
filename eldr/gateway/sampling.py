"""Which requests shall leave their expert counts behind, and what the gateway then knows of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

KEEP_COUNTS: Mapping[str, str] = {"eldr_decode_counts": "kept"}
"""In a decode leg's `kv_transfer_params`: the decoder counts what it generates and keeps that for
`DecodeService.GetDecodeCounts` under the leg's reservation id. Its answer stays as it is."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A sampled request that ended well. It holds nothing of the text.

    `id` is the decode booking, under which the decoder keeps the counts; `signature` is the base64 text that the
    prefill leg gave. `decode_grpc` is empty where the prefill leg's token was the whole answer.
    """

    id: str
    signature: str
    decode_grpc: str
    domain: str


class CountSampler(Protocol):
    """Both calls are on the request path and return at once."""

    def wanted(self) -> bool:
        """Whether the next request is sampled."""
        ...

    def offer(self, finished: FinishedRequest) -> None:
        """A sampled request ended well."""
        ...


class NoSampling:
    """Samples nothing."""

    def wanted(self) -> bool:
        """False."""
        return False

    def offer(self, finished: FinishedRequest) -> None:
        """Never called, since nothing is wanted."""
