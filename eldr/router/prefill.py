"""Choice of a prefill worker: consistent hashing of the prompt's beginning with bounded load.

Equal prefixes meet their cache on the same worker, unless that one has more than BOUND times the mean load
(facts: "Prefill side"). The hash is fixed, so every router and every process agrees (case 3.23).
"""

import hashlib
import math
from collections.abc import Mapping

PREFIX_BYTES = 1024
BOUND = 1.25


def preference(key: bytes, worker_ids: list[str]) -> list[str]:
    """Workers in the order in which this key prefers them (rendezvous hashing).

    A worker that joins or leaves moves only the keys that prefer it most.
    """

    def weight(worker_id: str) -> bytes:
        return hashlib.blake2b(key[:PREFIX_BYTES] + b"\0" + worker_id.encode(), digest_size=16).digest()

    return sorted(worker_ids, key=weight, reverse=True)


def choose_prefill(key: bytes, loads: Mapping[str, int]) -> str:
    """The most preferred worker with room. `loads` are the bookings of every eligible worker, not empty.

    Room is up to ceil(BOUND * mean) bookings, this one counted; some worker always has it.
    """
    room = math.ceil(BOUND * (sum(loads.values()) + 1) / len(loads))
    order = preference(key, list(loads))
    return next(worker_id for worker_id in order if loads[worker_id] + 1 <= room)
