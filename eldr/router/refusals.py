"""One status code per refusal of the core, and the wrapper that sends it."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from eldr.calibration.profile import ProfileError, ProfileMismatchError
from eldr.router.errors import AddressNotAllowedError, NoWorkerError, RequestError, UnknownModelError
from eldr.router.fleet import FleetMismatchError, UnknownWorkerError
from eldr.router.ledger import AlreadyReleasedError
from eldr.routing.contract import PolicyError
from eldr.rpc.codec import CodecError
from eldr.rpc.settings import ERROR_METADATA_KEY, NO_WORKER

Service = TypeVar("Service")
Context = grpc.aio.ServicerContext[Any, Any]

MAX_DETAIL_CHARACTERS = 2000
"""The detail travels as a header; a longer one is cut."""

CODES: dict[type[Exception], grpc.StatusCode] = {
    RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CodecError: grpc.StatusCode.INVALID_ARGUMENT,
    PolicyError: grpc.StatusCode.INVALID_ARGUMENT,
    AddressNotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    FleetMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    ProfileMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    ProfileError: grpc.StatusCode.INVALID_ARGUMENT,
    AlreadyReleasedError: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownWorkerError: grpc.StatusCode.NOT_FOUND,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    NoWorkerError: grpc.StatusCode.UNAVAILABLE,
}


def answers(
    method: Callable[[Service, Any], Any],
) -> Callable[[Service, Any, Context], Awaitable[Any]]:
    """Makes a unary handler of a synchronous method: what it raises of CODES becomes the call's status."""

    @functools.wraps(method)
    async def handler(self: Service, request: Any, context: Context) -> Any:
        try:
            return method(self, request)
        except tuple(CODES) as error:
            code = next(code for kind, code in CODES.items() if isinstance(error, kind))
            marks = ((ERROR_METADATA_KEY, NO_WORKER),) if isinstance(error, NoWorkerError) else ()
            await context.abort(code, str(error)[:MAX_DETAIL_CHARACTERS], marks)

    return handler
