"""How often one host may register workers."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_HOSTS = 4096
"""Hosts whose rate is remembered; the one that was silent for longest is forgotten first."""


@dataclass(slots=True)
class _Bucket:
    left: float
    filled_s: float


class RegistrationRate:
    """A token bucket for each host: `per_s` registrations a second, and as many more at once.

    Workers repeat theirs every second, so the rate bounds the worker processes of a host.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = max(1.0, 2 * per_s)
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def allows(self, peer: str) -> bool:
        """Counts a registration of a gRPC peer such as "ipv4:10.0.0.7:51234". False where it is one too many."""
        host = peer.rpartition(":")[0] or peer
        now_s = self._clock()
        bucket = self._buckets.setdefault(host, _Bucket(self._burst, now_s))
        self._buckets.move_to_end(host)
        while len(self._buckets) > MAX_HOSTS:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now_s - bucket.filled_s) * self._per_s)
        bucket.filled_s = now_s
        if bucket.left < 1:
            return False
        bucket.left -= 1
        return True
