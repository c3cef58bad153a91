"""Scheduler side of prefill: from block sums to the signature in the answer, and the life of a held transfer."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from eldr.engine.held_transfers import HeldTransfers
from eldr.rpc.codec import signature_to_text
from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

log = structlog.get_logger()

SIGNATURE_KEY = "eldr_signature"
"""Key of the signature in `kv_transfer_params`."""


def signature_of_counts(
    counts: npt.NDArray[np.int32], tokens: int, geometry: ModelGeometry
) -> ExpertSignature | None:
    """Signature of a prompt of `tokens` tokens whose block rows sum to `counts` [layers, experts].

    None where the layers disagree about how many tokens were captured, or none was: such a sum is no signature
    of anything (cases 1.3, 1.6, 1.12). Fewer covered tokens than tokens is a signature that says so.
    """
    sums = counts.sum(axis=1, dtype=np.int64)
    covered, rest = divmod(int(sums[0]), geometry.top_k)
    if rest or not (sums == sums[0]).all() or not 0 < covered <= tokens:
        return None
    return ExpertSignature(geometry.fingerprint, geometry.top_k, tokens, covered, counts.astype(np.uint32))


def remote_tokens(found: int, computed: int, params: Mapping[str, Any]) -> int:
    """Tokens of a prompt to take over from prefill, of `found` beyond the `computed` ones that the decoder has.

    vLLM's NIXL connector takes the whole prompt of the decode leg for remote. Where that prompt goes on after what
    prefill computed (`remote_num_tokens`), the rest has no KV anywhere and is computed here (case 2.23).
    """
    held = params.get("remote_num_tokens")
    if not params.get("do_remote_prefill") or type(held) is not int or held <= 0:
        return found
    return max(0, min(found, held - computed))


@dataclass(slots=True)
class HandoffCounters:
    """What happened to prompts and hand-offs since the process started."""

    signatures: int = 0
    partial_signatures: int = 0
    missing_signatures: int = 0
    releases: int = 0


@dataclass(slots=True)
class PrefillHandoff:
    """State of the prefill scheduler's connector. The engine thread writes, the gRPC thread reads and asks.

    `request_finished` runs before the step's worker report is read, in the same `update_from_output`; the answer
    is serialised later. So the parameters go out with the signature's place reserved, and `completed` fills it.
    `can_release` says whether the connector can free a held transfer before its own time.
    """

    geometry: ModelGeometry
    recent_limit: int
    on_signature: Callable[[str, ExpertSignature], None] = lambda _request_id, _signature: None
    can_release: bool = True
    counters: HandoffCounters = field(default_factory=HandoffCounters)
    transfers: HeldTransfers = field(default_factory=HeldTransfers)
    _awaiting: dict[str, dict[str, Any]] = field(default_factory=dict)
    _recent: OrderedDict[str, ExpertSignature] = field(default_factory=OrderedDict)
    _asked: deque[str] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finished(self, request_id: str, held: bool, params: dict[str, Any] | None) -> None:
        """A request ended; `held` when its blocks wait for a decoder."""
        if held:
            self.transfers.hold(request_id)
        if params is not None:
            known = self._recent.get(request_id)
            params[SIGNATURE_KEY] = signature_to_text(known) if known else None
            if known is None:
                self._awaiting[request_id] = params

    def completed(self, request_id: str, prompt_tokens: int, counts: npt.NDArray[np.int32]) -> None:
        """The block sums of a complete prompt arrived."""
        signature = signature_of_counts(counts, prompt_tokens, self.geometry)
        params = self._awaiting.pop(request_id, None)
        if signature is None:
            self.counters.missing_signatures += 1
            log.warning("signature_incomplete", request_id=request_id, sums=counts.sum(axis=1).tolist())
            return
        self.counters.signatures += 1
        self.counters.partial_signatures += signature.covered_tokens < signature.tokens
        with self._lock:
            self._recent[request_id] = signature
            while len(self._recent) > self.recent_limit:
                self._recent.popitem(last=False)
        if params is not None:
            params[SIGNATURE_KEY] = signature_to_text(signature)
        self.on_signature(request_id, signature)

    def step_ended(self, sent: set[str], expired: Collection[str] = ()) -> None:
        """`sent` transfers are over, by `expired` leases or read. Whoever awaits a signature of this step gets none."""
        self.counters.missing_signatures += len(self._awaiting)
        self._awaiting.clear()
        self.transfers.end(sent, expired)

    def signature(self, request_id: str) -> ExpertSignature | None:
        """A recent signature. Any thread."""
        with self._lock:
            return self._recent.get(request_id)

    @property
    def held(self) -> int:
        """Requests whose blocks wait for a decoder. Any thread."""
        return len(self.transfers)

    def ask_release(self, request_id: str) -> bool:
        """Asks the engine to free a held transfer in its next step; False when it is not held, or cannot be freed.

        Any thread.

        `request_id` is the engine's own, or the X-Request-Id of a leg whose sender never saw the answer. While
        a transfer is held the engine keeps stepping, so the request never waits for other work.
        """
        held = self.transfers.find(request_id)
        if held is None or not self.can_release:
            return False
        with self._lock:
            self._asked.append(held)
        return True

    def take_releases(self) -> list[str]:
        """Transfers to free now, each once. Engine thread."""
        with self._lock:
            asked = [request_id for request_id in dict.fromkeys(self._asked) if request_id in self.transfers]
            self._asked.clear()
        self.counters.releases += len(asked)
        return asked
