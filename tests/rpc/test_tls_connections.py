"""TLS on real gRPC and HTTP connections: who gets in, who does not, and certificates swapped on disk."""

import contextlib
import dataclasses
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from aiohttp import web

from eldr.rpc.calling import Caller, Line, tls_hint
from eldr.rpc.security import Tls, TlsFiles
from eldr.rpc.settings import server_options
from eldr.testing.certificates import Authority, authority


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path, "fleet")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return authority(tmp_path, "stranger")


@contextlib.asynccontextmanager
async def grpc_server(tls: Tls | None) -> AsyncIterator[str]:
    """Echoes bytes; its address."""

    async def echo(request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        return request

    server = grpc.aio.server(options=server_options())
    method = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": method}),))
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def call_of(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable:
    return channel.unary_unary("/test.Service/Call")


async def call(line: Line) -> str:
    """ "ok", or what the failed call says."""
    try:
        assert await line.stub(call_of)(b"x", timeout=5) == b"x"
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "ok"


async def call_once(address: str, files: TlsFiles | None) -> str:
    line = Line(address, Caller(Tls(files) if files else None))
    try:
        return await call(line)
    finally:
        await line.close()


@contextlib.asynccontextmanager
async def http_server(tls: Tls) -> AsyncIterator[str]:
    """Answers every GET; its URL."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server_context()).start()
    yield f"https://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def get(url: str, tls: Tls) -> str:
    """ "ok", or the name of what the failed request raised."""
    async with aiohttp.ClientSession() as session:
        return await get_with(session, url, tls)


async def get_with(session: aiohttp.ClientSession, url: str, tls: Tls) -> str:
    try:
        async with session.get(url, ssl=tls.client_context()) as response:
            return await response.text()
    except aiohttp.ClientError as error:
        return f"{type(error).__name__}: {error}"


async def test_grpc_with_the_right_authority_passes(ca: Authority) -> None:
    async with grpc_server(Tls(ca.files("server"))) as address:
        assert await call_once(address, TlsFiles(ca=ca.pem)) == "ok"


async def test_grpc_with_another_authority_is_refused(ca: Authority, stranger: Authority) -> None:
    async with grpc_server(Tls(ca.files("server"))) as address:
        said = await call_once(address, TlsFiles(ca=stranger.pem))
    assert "not signed by this side's tls ca" in tls_hint(said)


async def test_grpc_without_a_client_certificate_or_with_a_strangers_is_refused_where_one_is_asked_for(
    ca: Authority, stranger: Authority
) -> None:
    async with grpc_server(Tls(ca.files("server", require_client_cert=True))) as address:
        assert await call_once(address, ca.files("client")) == "ok"
        assert await call_once(address, TlsFiles(ca=ca.pem)) != "ok"
        theirs = dataclasses.replace(stranger.files("client"), ca=ca.pem)
        said = await call_once(address, theirs)
    assert "tls cert and key" in tls_hint(said)


async def test_a_grpc_error_says_which_side_speaks_tls(ca: Authority) -> None:
    """Case 4.11, both ways round."""
    async with grpc_server(None) as address:
        assert "the other side speaks plaintext" in tls_hint(await call_once(address, TlsFiles(ca=ca.pem)))
    async with grpc_server(Tls(ca.files("server"))) as address:
        assert "where the other side speaks TLS" in tls_hint(await call_once(address, None))


async def test_a_grpc_server_shows_the_certificate_that_was_swapped_on_disk(
    ca: Authority, stranger: Authority, tmp_path: Path
) -> None:
    files = ca.files("server")
    async with grpc_server(Tls(files)) as address:
        assert await call_once(address, TlsFiles(ca=ca.pem)) == "ok"
        stranger.sign("server")
        assert await call_once(address, TlsFiles(ca=stranger.pem)) == "ok"
        assert await call_once(address, TlsFiles(ca=ca.pem)) != "ok"


async def test_a_grpc_client_reconnects_with_the_authority_that_was_swapped_on_disk(
    ca: Authority, stranger: Authority
) -> None:
    """The whole fleet moves to another authority, nothing restarts."""
    trusted = ca.folder / "trusted.pem"
    trusted.write_bytes(stranger.pem.read_bytes())
    async with grpc_server(Tls(ca.files("server"))) as address:
        line = Line(address, Caller(Tls(TlsFiles(ca=trusted))))
        assert await call(line) != "ok"
        assert not await line.renew()
        trusted.write_bytes(ca.pem.read_bytes())
        assert await line.renew()
        assert await call(line) == "ok"
        await line.close()


async def test_http_with_the_right_authority_passes_and_with_another_not(
    ca: Authority, stranger: Authority
) -> None:
    async with http_server(Tls(ca.files("server"))) as url:
        assert await get(url, Tls(TlsFiles(ca=ca.pem))) == "ok"
        assert "ClientConnectorCertificateError" in await get(url, Tls(TlsFiles(ca=stranger.pem)))


async def test_http_without_a_client_certificate_or_with_a_strangers_is_refused_where_one_is_asked_for(
    ca: Authority, stranger: Authority
) -> None:
    async with http_server(Tls(ca.files("server", require_client_cert=True))) as url:
        assert await get(url, Tls(ca.files("client"))) == "ok"
        assert await get(url, Tls(TlsFiles(ca=ca.pem))) != "ok"
        theirs = dataclasses.replace(stranger.files("client"), ca=ca.pem)
        assert await get(url, Tls(theirs)) != "ok"


async def test_an_http_server_shows_the_certificate_and_asks_by_the_authority_that_were_swapped_on_disk(
    ca: Authority, stranger: Authority
) -> None:
    trusted = ca.folder / "trusted.pem"
    trusted.write_bytes(ca.pem.read_bytes())
    files = dataclasses.replace(ca.files("server", require_client_cert=True), ca=trusted)
    ours = Tls(ca.files("client"))
    theirs = Tls(stranger.files("visitor"))
    async with http_server(Tls(files)) as url:
        assert await get(url, ours) == "ok"
        stranger.sign("server")
        trusted.write_bytes(stranger.pem.read_bytes())
        assert await get(url, theirs) == "ok"
        assert await get(url, ours) != "ok"


async def test_an_http_client_takes_the_swapped_authority_for_its_next_connection(
    ca: Authority, stranger: Authority
) -> None:
    trusted = ca.folder / "trusted.pem"
    trusted.write_bytes(stranger.pem.read_bytes())
    client = Tls(TlsFiles(ca=trusted))
    async with http_server(Tls(ca.files("server"))) as url, aiohttp.ClientSession() as session:
        assert await get_with(session, url, client) != "ok"
        trusted.write_bytes(ca.pem.read_bytes())
        assert await get_with(session, url, client) == "ok"
        assert client.client_context() is client.client_context()


async def test_no_version_before_tls_1_2_is_spoken(ca: Authority) -> None:
    tls = Tls(ca.files("server"))
    for context in (tls.server_context(), tls.client_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
