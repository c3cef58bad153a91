"""What the gateway exports at its `/metrics` (docs/metrics.md)."""

from collections import Counter
from collections.abc import Iterator

from eldr.gateway.counters import Counts
from eldr.observability.histogram import Histogram
from eldr.observability.series import Catalogue, Kind, Sample, Series

GATEWAY = Catalogue(
    Series(
        "eldr_gateway_requests_total",
        Kind.COUNTER,
        "Requests answered; status 0 is a client that left.",
        ("path", "status"),
    ),
    Series("eldr_gateway_request_seconds", Kind.HISTOGRAM, "A request from its head to its last byte."),
    Series(
        "eldr_gateway_first_token_seconds",
        Kind.HISTOGRAM,
        "A streamed request from its head to its first event (TTFT).",
    ),
    Series("eldr_gateway_running", Kind.GAUGE, "Requests that run now."),
    Series("eldr_gateway_waiting", Kind.GAUGE, "Requests that wait for a turn now."),
    Series(
        "eldr_gateway_events_total",
        Kind.COUNTER,
        "Fallbacks and failures, a name per branch (docs/gateway.md).",
        ("event",),
    ),
)

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class GatewayMetrics:
    """Times and outcomes of requests, and the gateway's counts."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = Histogram(_BOUNDS_S)
        self._first_token = Histogram(_BOUNDS_S)

    def finished(self, path: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests[path, status] += 1
        self._seconds.observe(seconds)

    def first_event(self, seconds: float) -> None:
        """A stream's first event is about to be sent."""
        self._first_token.observe(seconds)

    def samples(self, running: int, waiting: int) -> Iterator[Sample]:
        """All values now."""
        for (path, status), count in self._requests.items():
            yield Sample("eldr_gateway_requests_total", count, {"path": path, "status": str(status)})
        yield Sample("eldr_gateway_request_seconds", self._seconds)
        yield Sample("eldr_gateway_first_token_seconds", self._first_token)
        yield Sample("eldr_gateway_running", running)
        yield Sample("eldr_gateway_waiting", waiting)
        for event, count in self._counts.items():
            yield Sample("eldr_gateway_events_total", count, {"event": event.value})
