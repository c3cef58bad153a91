"""Bytes that are no message end a call as INVALID_ARGUMENT, where gRPC alone says INTERNAL, as if we had failed."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class Strict:
    """Stands before a server where services of asynchronous methods are added to it.

    add_RouterServiceServicer_to_server(servicer, Strict(server))
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As a server's, with every method wrapped."""
        self._server.add_generic_rpc_handlers(tuple(map(_StrictHandlers, handlers)))

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As a server's: the same methods once more, which the asynchronous server does not look at."""


class _StrictHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._made: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        if method not in self._made:
            found = self._inner.service(handler_call_details)
            if found is None:
                return None
            self._made[method] = _strict(found)
        return self._made[method]


def _strict(handler: Any) -> Any:
    """A handler with one request message, which it reads itself."""
    parse = handler.request_deserializer
    if parse is None or handler.request_streaming:
        return handler

    async def read(raw: bytes, context: Any) -> Any:
        try:
            return parse(raw)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this call")
            raise AssertionError("abort raises") from None

    if handler.response_streaming:

        async def stream(raw: bytes, context: Any) -> AsyncIterator[Any]:
            request = await read(raw, context)
            async with aclosing(handler.unary_stream(request, context)) as messages:
                async for message in messages:
                    yield message

        return grpc.unary_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)

    async def answer(raw: bytes, context: Any) -> Any:
        return await handler.unary_unary(await read(raw, context), context)

    return grpc.unary_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)
