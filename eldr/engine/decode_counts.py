"""Expert counts of what single requests decoded, on request: for calibration and for the predictor."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eldr.rpc.codec import signature_to_text
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

WANTED_KEY = "eldr_decode_counts"
"""Set to true in the decode leg's `kv_transfer_params` to have the request's decode picks counted.

With KEPT instead of true the answer stays as it is: the counts are kept for `DecodeService.GetDecodeCounts`.
"""

KEPT = "kept"

RESULT_KEY = "eldr_decode_signature"
"""Key of the counts in the decode answer's `kv_transfer_params`."""


class Generating(Protocol):
    """What is read of vLLM's request. `num_tokens` are the prompt's and those generated and accepted so far."""

    num_prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class _Tracked:
    request: Generating
    counts: npt.NDArray[np.uint32]
    # First position that is not counted yet, so that a resumed request counts nothing twice.
    next_position: int
    keep_as: str = ""
    tokens: int = 0
    params: dict[str, Any] | None = None


@dataclass(slots=True)
class DecodeCounts:
    """Counts of generated tokens per request, [layers, experts]. Bounded by `limit` requests at a time.

    The `keep_limit` newest of those that shall be kept can be read afterwards, by any thread. The last sampled token
    of a request is never run through the model, so a finished request covers one token less than it generated.
    Drafts that were run and rejected are not counted.
    """

    geometry: ModelGeometry
    limit: int
    keep_limit: int = 0
    refused: int = 0
    _tracked: dict[str, _Tracked] = field(default_factory=dict)
    _ending: list[str] = field(default_factory=list)
    _kept: OrderedDict[str, ExpertSignature] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(
        self, request_id: str, request: Generating, *, computed: int | None = None, keep_as: str = ""
    ) -> bool:
        """Tracks a request; False where `limit` requests are tracked already.

        `computed` is how many tokens prefill computed, where that is less than the prompt: the prompt's other
        tokens were generated, so their picks are counted here and nowhere else (case 1.16). With `keep_as` the
        counts are kept under that name and the answer stays as it is.
        """
        if len(self._tracked) >= self.limit:
            self.refused += 1
            return False
        counts = np.zeros(self.geometry.shape, np.uint32)
        first = request.num_prompt_tokens if computed is None else min(computed, request.num_prompt_tokens)
        self._tracked[request_id] = _Tracked(request, counts, first, keep_as)
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tracked

    def wanted(self, request_id: str, end: int) -> range:
        """Positions whose picks are wanted of a step that runs the request up to position `end`.

        It may name more than the step runs: where steps overlap, earlier ones are not known to be accepted yet.
        """
        return range(self._tracked[request_id].next_position, end)

    def add(self, request_id: str, positions: range, picks: npt.NDArray[np.int32]) -> None:
        """Counts the accepted tokens among those of a finished step.

        picks: [positions, layers, top_k]; negative where a token was not run or not captured, which counts nothing.
        The step's sampled tokens are in the request by now, and all but the newest token have been run for good.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        final = tracked.request.num_tokens - 1
        news = picks[max(0, tracked.next_position - positions.start) : max(0, final - positions.start)]
        known = news[(news >= 0).all(axis=(1, 2))]
        np.add.at(tracked.counts, (np.arange(self.geometry.layers)[None, :, None], known), 1)
        tracked.tokens += len(known)
        tracked.next_position = max(tracked.next_position, final)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """The answer's parameters, to be filled when the step's report is read.

        None if it was not tracked, or if its answer stays as it is.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        self._ending.append(request_id)
        if tracked.keep_as:
            # A request that the front end stopped, at a stop string say, may be followed by no step at all.
            self._keep(tracked.keep_as, self._signature(tracked))
        else:
            tracked.params = {RESULT_KEY: None}
        return tracked.params

    def step_ended(self) -> None:
        """Fills the answers of requests that ended in this step, or keeps their counts, and forgets them."""
        for request_id in self._ending:
            tracked = self._tracked.pop(request_id)
            if tracked.keep_as:
                self._keep(tracked.keep_as, self._signature(tracked))
            elif tracked.params is not None and tracked.tokens:
                tracked.params[RESULT_KEY] = signature_to_text(self._signature(tracked))
        self._ending.clear()

    def kept(self, name: str) -> ExpertSignature | None:
        """Counts kept under a name; of no token where the request ended with its first. Any thread.

        Complete once the request's last output has left the engine.
        """
        with self._lock:
            return self._kept.get(name)

    def _keep(self, name: str, signature: ExpertSignature) -> None:
        with self._lock:
            self._kept[name] = signature
            while len(self._kept) > self.keep_limit:
                self._kept.popitem(last=False)

    def _signature(self, tracked: _Tracked) -> ExpertSignature:
        geometry = self.geometry
        return ExpertSignature(
            geometry.fingerprint, geometry.top_k, tracked.tokens, tracked.tokens, tracked.counts
        )
