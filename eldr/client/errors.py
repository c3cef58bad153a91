"""What a call to the router or to a worker can end with."""

from typing import Any

import grpc
import grpc.aio

from eldr.rpc.calling import tls_hint
from eldr.rpc.settings import ERROR_METADATA_KEY, NO_WORKER


class CallError(Exception):
    """A failed call: the gRPC status code and what the other side said."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.detail = detail


class RouterError(CallError):
    """The router refused the call or did not answer in time."""


class NoWorkerError(RouterError):
    """The router is well but no worker can take the request; `detail` says why."""


class RouterUnreachableError(RouterError):
    """No router of the given addresses could be reached."""


class WorkerError(CallError):
    """A worker refused the call or did not answer in time."""


class WorkerUnreachableError(WorkerError):
    """The worker's gRPC port could not be reached."""


def is_unreachable(error: grpc.aio.AioRpcError) -> bool:
    """True where the transport failed, false where the router itself said UNAVAILABLE."""
    return error.code() == grpc.StatusCode.UNAVAILABLE and _marker(error) == ""


def router_error(error: grpc.aio.AioRpcError, address: str) -> RouterError:
    """The typed form of a failed call to the router at `address`."""
    detail = error.details() or ""
    if is_unreachable(error):
        return RouterUnreachableError(error.code(), f"router {address}: {_with_hint(detail)}")
    if _marker(error) == NO_WORKER:
        return NoWorkerError(error.code(), detail)
    return RouterError(error.code(), detail)


def worker_error(error: grpc.aio.AioRpcError, address: str) -> WorkerError:
    """The typed form of a failed call to the worker at `address`."""
    kind = WorkerUnreachableError if error.code() == grpc.StatusCode.UNAVAILABLE else WorkerError
    return kind(error.code(), f"worker {address}: {_with_hint(error.details() or '')}")


def _with_hint(detail: str) -> str:
    hint = tls_hint(detail)
    return f"{detail} ({hint})" if hint else detail


def _marker(error: grpc.aio.AioRpcError) -> str:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == ERROR_METADATA_KEY:
            return value if isinstance(value, str) else ""
    return ""
