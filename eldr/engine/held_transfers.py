"""Hand-offs whose KV waits at a prefill worker, and which of those that are over a decoder had read by then."""

import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

REMEMBERED = 4096
"""Transfers that were read and whose decoder may still ask: it asks right after its pull."""


@dataclass(slots=True)
class HeldTransfers:
    """The engine thread writes before vLLM frees any block; any thread reads. Whoever asks gets the truth then.

    A transfer that ended because its lease ran out, or was released, is forgotten: its blocks may hold another
    prompt's KV by the time they are read (case 2.1).
    """

    remembered: int = REMEMBERED
    _held: dict[str, str | None] = field(default_factory=dict)
    _expired: set[str] = field(default_factory=set)
    _read: OrderedDict[str, str | None] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, transfer_id: str) -> None:
        """The blocks of a finished prompt wait for a decoder from now on."""
        with self._lock:
            self._held[transfer_id] = None

    def end(self, over: Collection[str], expired: Collection[str]) -> None:
        """`over` transfers end now; ranks have given up `expired` ones now, which may be over later."""
        with self._lock:
            self._expired.update(transfer_id for transfer_id in expired if transfer_id in self._held)
            for transfer_id in over:
                if transfer_id not in self._held:
                    continue
                reader = self._held.pop(transfer_id)
                if transfer_id in self._expired:
                    self._expired.remove(transfer_id)
                    continue
                self._read[transfer_id] = reader
                if len(self._read) > self.remembered:
                    self._read.popitem(last=False)

    def confirm(self, transfer_id: str, reader_id: str) -> bool:
        """Whether the KV that `reader_id` has pulled was held until then. The same answer each time.

        A hand-off has one reader: where it is over, another one pulled what was free already.
        """
        with self._lock:
            if transfer_id in self._expired:
                return False
            known = self._held if transfer_id in self._held else self._read
            if transfer_id not in known:
                return False
            if known[transfer_id] is None:
                known[transfer_id] = reader_id
            return known[transfer_id] == reader_id

    def find(self, leg_id: str) -> str | None:
        """The engine's id of a held transfer: vLLM puts the kind before an X-Request-Id and a suffix after it."""
        with self._lock:
            if leg_id in self._held:
                return leg_id
            begins = (f"cmpl-{leg_id}-", f"chatcmpl-{leg_id}-")
            return next((held for held in self._held if held.startswith(begins)), None)

    def __contains__(self, transfer_id: str) -> bool:
        with self._lock:
            return transfer_id in self._held

    def __len__(self) -> int:
        return len(self._held)
