"""What a request can end with: the gateway's own answers, a worker's refusal, a failed leg."""

import json

import grpc

from eldr.client import NoWorkerError, Outcome, RouterError
from eldr.gateway.breaker import Fault

_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

RETRY_AFTER_S = 1
"""What a client is told to wait where no worker could take its request."""


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """The error object of the OpenAI API with vLLM's fields, as JSON bytes."""
    error = {
        "message": message,
        "type": _KINDS.get(status, "InternalServerError"),
        "param": param,
        "code": status,
    }
    return json.dumps({"error": error}).encode()


class GatewayError(Exception):
    """An answer that the gateway gives itself. `retry_after_s` is sent where it is positive."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """JSON bytes."""
        return error_body(self.status, self.message, self.param)


def refused(param: str, message: str) -> GatewayError:
    """400: the request itself cannot be served."""
    return GatewayError(400, message, param=param)


def too_many(message: str) -> GatewayError:
    """429 with Retry-After: more than one client, or all of them together, may have at a time."""
    return GatewayError(429, message, retry_after_s=RETRY_AFTER_S)


def unavailable(message: str) -> GatewayError:
    """503 with Retry-After: nobody can take the request now."""
    return GatewayError(503, message, retry_after_s=RETRY_AFTER_S)


def from_router(error: RouterError) -> GatewayError:
    """404 for a model that the fleet does not serve, 400 for a request that the router refuses, else 503."""
    if isinstance(error, NoWorkerError):
        return unavailable(f"no worker can take the request: {error.detail}")
    if error.code is grpc.StatusCode.NOT_FOUND:
        return GatewayError(404, error.detail, param="model")
    if error.code is grpc.StatusCode.INVALID_ARGUMENT:
        return GatewayError(400, error.detail)
    return unavailable(f"the router does not answer: {error}")


class LegError(Exception):
    """A leg that a worker did not serve.

    `reached` is true where the worker may have read the request: the KV of a decode leg may then be pulled or
    freed already, so no other decoder may be sent to the same blocks. `retryable` is true for what another
    worker may do better: transport errors and 429, 502, 503, 504, never a deterministic answer.
    """

    def __init__(
        self, worker_id: str, detail: str, *, outcome: Outcome, reached: bool = True, retryable: bool = False
    ) -> None:
        super().__init__(f"worker {worker_id}: {detail}")
        self.worker_id = worker_id
        self.outcome = outcome
        self.reached = reached
        self.retryable = retryable

    @property
    def fault(self) -> Fault:
        """What the failure says about the worker."""
        if self.outcome in (Outcome.BACKPRESSURE, Outcome.ABANDONED):
            return Fault.NONE
        return Fault.SILENT if self.retryable or self.outcome is Outcome.TIMEOUT else Fault.ANSWERED

    def as_gateway_error(self) -> GatewayError:
        """503 from a full worker or one that is closed off, 504 on a timeout, else 502."""
        if self.outcome in (Outcome.BACKPRESSURE, Outcome.ABANDONED):
            return unavailable(str(self))
        return GatewayError(504 if self.outcome is Outcome.TIMEOUT else 502, str(self))


class WorkerLostError(LegError):
    """The worker is no longer there, though the connection stands."""

    def __init__(self, worker_id: str, detail: str) -> None:
        super().__init__(worker_id, detail, outcome=Outcome.TIMEOUT, retryable=True)

    @property
    def fault(self) -> Fault:
        """GONE."""
        return Fault.GONE


class BarredError(LegError):
    """The worker was picked, but gets no request now; it never heard of this one."""

    def __init__(self, worker_id: str, detail: str) -> None:
        super().__init__(worker_id, detail, outcome=Outcome.ABANDONED, reached=False, retryable=True)


class StaleHandoffError(BarredError):
    """The hand-off is no longer safely within its lease; its decoder is not to blame and never heard of it."""


class WorkerRefusalError(Exception):
    """A worker's 4xx: passed to the client as it is, never retried (cases 2.7, 2.9)."""

    def __init__(self, worker_id: str, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"worker {worker_id}: HTTP {status}")
        self.worker_id = worker_id
        self.status = status
        self.body = body
        self.content_type = content_type

    def as_gateway_error(self) -> GatewayError:
        """The same status and message as the gateway's own error, for a place that takes no raw body."""
        text = self.body.decode("utf-8", "replace")
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = text
        return GatewayError(self.status, str(message))
