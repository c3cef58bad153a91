"""What every channel and server shares, tried on real connections over loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from eldr.rpc import settings

Handler = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


@asynccontextmanager
async def connected(
    handler: Handler,
    server_options: settings.Options | None = None,
    channel_options: settings.Options | None = None,
) -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable]:
    """A call of bytes to `handler` through a server and a channel with the shared options."""
    server = grpc.aio.server(options=settings.server_options() if server_options is None else server_options)
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = settings.channel_options() if channel_options is None else channel_options
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel.unary_unary("/test.Service/Call")
    await server.stop(None)


async def echo(request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    return request


async def test_a_message_over_the_library_default_of_4_mib_passes_both_ways() -> None:
    """Case 4.2: the limit is raised on the channel and on the server."""
    async with connected(echo) as call:
        sent = bytes(5 << 20)
        assert len(await call(sent, timeout=30)) == len(sent)


async def test_a_request_over_the_limit_is_refused_by_name_before_it_is_sent() -> None:
    """Case 4.2: the error names the limit, and it is not UNAVAILABLE."""
    async with connected(echo) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(settings.MAX_MESSAGE_BYTES + 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(settings.MAX_MESSAGE_BYTES) in str(caught.value.details())


async def test_a_request_over_the_servers_limit_is_refused_by_name() -> None:
    """Case 4.2: a client with another setting of its own meets the server's limit."""
    unlimited = [("grpc.max_send_message_length", -1)]
    async with connected(echo, channel_options=unlimited) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(settings.MAX_MESSAGE_BYTES + 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(settings.MAX_MESSAGE_BYTES) in str(caught.value.details())


async def test_an_answer_over_the_limit_is_refused_by_name() -> None:
    """Case 4.2, the other direction."""

    async def large(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return bytes(settings.MAX_MESSAGE_BYTES + 1)

    async with connected(large) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(settings.MAX_MESSAGE_BYTES) in str(caught.value.details())


async def silent(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    await asyncio.sleep(7)
    return b"done"


async def test_pings_during_a_long_silent_call_end_it_only_where_one_side_knows_the_period(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 4.3, with the shared period at 1 s, beside the fault itself: a server with gRPC's own limits."""
    monkeypatch.setattr(settings, "KEEPALIVE_S", 1)
    async with connected(silent) as call, connected(silent, server_options=[]) as faulty:
        answer, error = await asyncio.gather(
            call(b"", timeout=30), faulty(b"", timeout=30), return_exceptions=True
        )
    assert answer == b"done"
    assert isinstance(error, grpc.aio.AioRpcError)
    assert "too many pings" in str(error.details()).lower()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_proxy_variables_do_not_divert_calls_to_workers(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 4.7: port 9 of loopback stands for a proxy that is not there."""
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with connected(echo) as call:
        assert await call(b"x", timeout=10) == b"x"


async def test_a_restarted_worker_is_reached_again_within_the_backoff_cap() -> None:
    """Case 4.9: the channel was failing for longer than its cap; then the worker is up."""
    first = grpc.aio.server(options=settings.server_options())
    port = first.add_insecure_port("127.0.0.1:0")
    await first.start()
    await first.stop(None)
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=settings.channel_options()) as channel:
        call = channel.unary_unary("/test.Service/Call")
        down_until = loop.time() + 2 * settings.MAX_RECONNECT_BACKOFF_S
        while loop.time() < down_until:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"", timeout=0.5, wait_for_ready=True)
        second = grpc.aio.server(options=settings.server_options())
        method = grpc.unary_unary_rpc_method_handler(echo)
        second.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", {"Call": method}),)
        )
        second.add_insecure_port(f"127.0.0.1:{port}")
        await second.start()
        up = loop.time()
        assert await call(b"x", timeout=20, wait_for_ready=True) == b"x"
        # gRPC jitters its pauses by a fifth; the rest is for a busy machine.
        assert loop.time() - up < 2 * settings.MAX_RECONNECT_BACKOFF_S
        await second.stop(None)
