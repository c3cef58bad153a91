"""Expert counts of what single requests decoded, on request: for calibration and for the predictor."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eldr.engine.step import Span
from eldr.rpc.codec import signature_to_text
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

WANTED_KEY = "eldr_decode_counts"
"""Set to true in the decode leg's `kv_transfer_params` to have the request's decode picks counted."""

RESULT_KEY = "eldr_decode_signature"
"""Key of the counts in the decode answer's `kv_transfer_params`."""


@dataclass(slots=True)
class _Tracked:
    counts: npt.NDArray[np.uint32]
    # First position whose picks were not asked for yet, so that a resumed request counts nothing twice.
    next_position: int
    tokens: int = 0
    params: dict[str, Any] | None = None


@dataclass(slots=True)
class DecodeCounts:
    """Counts of generated tokens per request, [layers, experts]. Bounded by `limit` requests at a time.

    The last sampled token of a request is never run through the model, so a finished request covers one token
    less than it generated.
    """

    geometry: ModelGeometry
    limit: int
    refused: int = 0
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _ending: list[str] = field(default_factory=list)

    def start(self, request_id: str, prompt_tokens: int) -> bool:
        """Tracks a request; False where `limit` requests are tracked already."""
        if len(self._tracked) >= self.limit:
            self.refused += 1
            return False
        self._tracked[request_id] = _Tracked(np.zeros(self.geometry.shape, np.uint32), prompt_tokens)
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tracked

    def wanted(
        self, request_id: str, first: int, tokens: int, blocks: list[int], block_size: int
    ) -> Span | None:
        """The part of a scheduled span whose picks are still unknown, None for nothing.

        `blocks` start with the block of position `first`.
        """
        tracked = self._tracked[request_id]
        start, end = max(first, tracked.next_position), first + tokens
        if start >= end:
            return None
        tracked.next_position = end
        return Span(start, end - start, blocks[start // block_size - first // block_size :])

    def add(self, request_id: str, picks: npt.NDArray[np.int32]) -> None:
        """Adds picks [tokens, layers, top_k]. Tokens with a missing pick are left out."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        known = picks[(picks >= 0).all(axis=(1, 2))]
        layers = np.arange(self.geometry.layers)[None, :, None]
        np.add.at(tracked.counts, (layers, known), 1)
        tracked.tokens += len(known)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """The answer's parameters, to be filled when the step's report is read. None if it was not tracked."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        tracked.params = {RESULT_KEY: None}
        self._ending.append(request_id)
        return tracked.params

    def step_ended(self) -> None:
        """Fills the answers of requests that ended in this step and forgets them."""
        for request_id in self._ending:
            tracked = self._tracked.pop(request_id)
            if tracked.params is not None and tracked.tokens:
                signature = ExpertSignature(
                    self.geometry.fingerprint,
                    self.geometry.top_k,
                    tracked.tokens,
                    tracked.tokens,
                    tracked.counts,
                )
                tracked.params[RESULT_KEY] = signature_to_text(signature)
        self._ending.clear()
