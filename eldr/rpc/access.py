"""Which role may make which gRPC call, and the interceptor that asks for its token."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog

from eldr.rpc.calling import AUTHORIZATION
from eldr.rpc.tokens import Role, TokenTable

log = structlog.get_logger()

_READERS = frozenset({Role.CLIENT, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})
_ANYONE_KNOWN = frozenset(Role)

PERMITTED: Mapping[str, frozenset[Role]] = {
    "/eldr.v1.RouterService/SelectPrefill": _READERS,
    "/eldr.v1.RouterService/ReleasePrefill": _READERS,
    "/eldr.v1.RouterService/ReserveDecode": _READERS,
    "/eldr.v1.RouterService/ReleaseDecode": _READERS,
    "/eldr.v1.RouterService/ExplainDecode": _READERS,
    "/eldr.v1.RouterService/WatchDecisions": _ADMIN,
    "/eldr.v1.FleetService/RegisterWorker": frozenset({Role.WORKER, Role.ADMIN}),
    "/eldr.v1.FleetService/ListWorkers": _READERS,
    "/eldr.v1.FleetService/WatchFleet": _READERS,
    "/eldr.v1.FleetService/DrainWorker": _ADMIN,
    "/eldr.v1.FleetService/RemoveWorker": _ADMIN,
    "/eldr.v1.ProfileService/GetProfile": _READERS,
    "/eldr.v1.ProfileService/GetDrift": _READERS,
    "/eldr.v1.ProfileService/GetPolicy": _READERS,
    "/eldr.v1.ProfileService/LoadProfile": _ADMIN,
    "/eldr.v1.ProfileService/SetPolicy": _ADMIN,
    # Served by the workers. The router shows them the workers' token.
    "/eldr.v1.DecodeService/GetInfo": _ANYONE_KNOWN,
    "/eldr.v1.DecodeService/GetState": _ANYONE_KNOWN,
    "/eldr.v1.DecodeService/WatchState": _ANYONE_KNOWN,
    "/eldr.v1.DecodeService/GetDecodeCounts": _READERS,
    "/eldr.v1.DecodeService/Drain": _ADMIN,
    "/eldr.v1.PrefillService/GetInfo": _ANYONE_KNOWN,
    "/eldr.v1.PrefillService/GetSignature": _READERS,
    "/eldr.v1.PrefillService/WatchSignatures": _READERS,
    "/eldr.v1.PrefillService/ReleaseTransfer": _READERS,
    # A decoder asks the prefill worker before it trusts what it pulled.
    "/eldr.v1.PrefillService/ConfirmTransfer": _ANYONE_KNOWN,
}
"""Roles per call. One that is not named is for admins."""

OPEN = ("/grpc.health.v1.Health/",)
"""Calls without a token: probes have none."""

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a call that its caller may not make, before its message is read.

    UNAUTHENTICATED without a token that is known, PERMISSION_DENIED with one of another role. Neither says which
    tokens there are.
    """

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The real handler, or one that refuses."""
        method = handler_call_details.method
        if method.startswith(OPEN):
            return await continuation(handler_call_details)
        role = self._tokens.role_of(_authorization(handler_call_details))
        if role is None:
            log.warning("call_without_known_token", method=method)
            return _refusing(
                grpc.StatusCode.UNAUTHENTICATED, "this call needs a bearer token that this server knows"
            )
        if role not in PERMITTED.get(method, _ADMIN):
            log.warning("call_not_permitted", method=method, role=role.value)
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, f"the role {role} may not make this call")
        return await continuation(handler_call_details)


def interceptors(tokens: TokenTable | None) -> list[AccessInterceptor]:
    """For a server; none where no tokens are configured."""
    return [] if tokens is None else [AccessInterceptor(tokens)]


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, str) else None
    return None


def _refusing(code: grpc.StatusCode, detail: str) -> Any:
    async def refuse(_request: bytes, context: Any) -> NoReturn:
        await context.abort(code, detail)
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(refuse)
