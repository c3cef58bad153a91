"""How a leg of a request ended; meanings as in `protos/eldr/v1/routing.proto`."""

from enum import StrEnum


class Outcome(StrEnum):
    """Reported with every release of a booking."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    CLIENT_ERROR = "client_error"
    BACKPRESSURE = "backpressure"
    WORKER_ERROR = "worker_error"
    TIMEOUT = "timeout"
    ABANDONED = "abandoned"
