"""Decoder side: KV that was pulled counts as received only once its prefill worker says that it was still held.

NIXL reads a prefill worker's memory whatever lies there. A decoder that was stopped, or cut off, may read after the
lease has ended and the blocks belong to another prompt (case 2.1). No clock of another machine is needed to tell:
the decoder asks after the pull, and what was held then was held throughout.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ADDRESS_KEY = "eldr_prefill_grpc"
"""Key of the prefill worker's gRPC address in `kv_transfer_params`."""

INCARNATION_KEY = "eldr_prefill_incarnation"


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where a request's KV comes from. `grpc_address` is empty where the prefill worker serves no eldr."""

    transfer_id: str
    grpc_address: str
    incarnation: str


def source_of(params: Mapping[str, Any]) -> KvSource | None:
    """The source that a decode leg's parameters name; None where nothing is pulled."""
    transfer_id = params.get("remote_request_id")
    if not params.get("do_remote_prefill") or not transfer_id or params.get("transfer_mode") == "push":
        return None
    return KvSource(
        str(transfer_id), str(params.get(ADDRESS_KEY) or ""), str(params.get(INCARNATION_KEY) or "")
    )


@dataclass(slots=True)
class PullCheck:
    """Which received requests vLLM may hear of. `ask` starts a question and returns; `answered` is its end."""

    ask: Callable[[str, KvSource], None]
    refused_transfers: int = 0
    unchecked_transfers: int = 0
    _sources: dict[str, KvSource] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)
    _refused: list[str] = field(default_factory=list)
    _answers: deque[tuple[str, bool]] = field(default_factory=deque)

    def arrived(self, request_id: str, params: Mapping[str, Any]) -> None:
        """A request entered the engine."""
        source = source_of(params)
        if source is not None:
            self._sources[request_id] = source

    def left(self, request_id: str) -> None:
        """A request ended. vLLM frees its blocks when it hears of the transfer, whatever was read."""
        self._sources.pop(request_id, None)
        if request_id in self._asked:
            self._asked.remove(request_id)
            self._gone.add(request_id)

    def answered(self, request_id: str, intact: bool) -> None:
        """A question's end; not intact where nobody could say. Any thread."""
        self._answers.append((request_id, intact))

    @property
    def waits(self) -> bool:
        """Whether the next step's end matters here even if nothing else happens in it."""
        return bool(self._asked or self._gone)

    def settle(self, received: set[str], failed: set[str]) -> set[str]:
        """A step's end: the requests that vLLM may take for received now, out of `received` and of earlier steps.

        `failed` ones are known as such to vLLM already, those that were refused here included.
        """
        heard = self._gone
        self._gone = set()
        for request_id in received:
            source = self._sources.pop(request_id, None)
            if source is None or request_id in failed:
                heard.add(request_id)
            elif not source.grpc_address:
                self.unchecked_transfers += 1
                heard.add(request_id)
            else:
                self._asked.add(request_id)
                self.ask(request_id, source)
        while self._answers:
            request_id, intact = self._answers.popleft()
            if request_id not in self._asked:
                continue
            self._asked.remove(request_id)
            if intact:
                heard.add(request_id)
            else:
                self.refused_transfers += 1
                self._refused.append(request_id)
        return heard

    def take_refused(self) -> list[str]:
        """Requests whose workers shall report a failed load in the next step, each once."""
        refused, self._refused = self._refused, []
        return refused
