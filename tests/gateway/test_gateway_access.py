"""Who gets in at the gateway, over what, and what the engines see of it."""

import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from eldr.gateway.access import ApiKeys
from eldr.gateway.counters import Counts
from eldr.gateway.engine_client import EngineClient
from eldr.gateway.errors import LegError
from eldr.gateway.server import GatewayServer
from eldr.gateway.settings import GatewaySettings
from eldr.rpc.security import Tls, TlsFiles
from eldr.rpc.tokens import TokenFile
from eldr.rpc.worker_status import WorkerRef
from eldr.testing.certificates import Authority, authority

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}
KEY = "sk-client-0123456789abcdef"
ENGINE_KEY = "sk-engine-0123456789abcdef"


def key_file(path: Path, *lines: str, shows: bool = False) -> TokenFile:
    path.write_text("\n".join(lines))
    return TokenFile(path, shows)


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def in_front(fleet, keys: ApiKeys | None = None, tls: Tls | None = None) -> AsyncIterator[str]:
    """host:port of another gateway before the same fleet."""
    server = GatewayServer(fleet.coordinator, fleet.releases, GatewaySettings(), "1.2.3", keys, tls)
    address = await server.start("127.0.0.1", 0)
    yield address
    await server.stop(0.0)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path, "fleet")


@pytest.mark.parametrize(
    "headers",
    [{}, bearing("sk-wrong-0123456789abcdef"), {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}],
)
async def test_a_request_without_a_known_key_is_a_401_in_openais_form(fleet, tmp_path, headers):
    keys = ApiKeys(key_file(tmp_path / "keys", KEY))
    with capture_logs() as logs:
        async with in_front(fleet, keys) as address:
            url = f"http://{address}/v1/completions"
            async with fleet.http.post(url, json=BODY, headers=headers) as response:
                reply = await response.json()
            async with fleet.http.get(f"http://{address}/v1/models", headers=headers) as models:
                assert models.status == 401
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert reply["error"]["type"] == "AuthenticationError"
    assert "sk-" not in reply["error"]["message"]
    assert "sk-" not in repr(logs)
    assert not fleet.sent_to(fleet.prefills)


async def test_probes_need_no_key(fleet, tmp_path):
    async with in_front(fleet, ApiKeys(key_file(tmp_path / "keys", KEY))) as address:
        for path in ("/health", "/version"):
            async with fleet.http.get(f"http://{address}{path}") as response:
                assert response.status == 200


@pytest.mark.parametrize("line", [KEY, "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()])
async def test_a_clients_key_stays_at_the_gateway(fleet, tmp_path, line):
    async with in_front(fleet, ApiKeys(key_file(tmp_path / "keys", line))) as address:
        url = f"http://{address}/v1/completions"
        async with fleet.http.post(url, json=BODY, headers=bearing(KEY)) as response:
            assert response.status == 200
    seen = [request for engine in (*fleet.prefills, *fleet.decodes) for request in engine.requests]
    assert len(seen) == 2
    assert not any("authorization" in map(str.lower, request.headers) for request in seen)


async def test_engines_see_their_own_key(fleet, tmp_path):
    keys = ApiKeys(key_file(tmp_path / "keys", KEY), key_file(tmp_path / "engine", ENGINE_KEY, shows=True))
    async with in_front(fleet, keys) as address:
        url = f"http://{address}/v1/completions"
        async with fleet.http.post(url, json=BODY, headers=bearing(KEY)) as response:
            assert response.status == 200
    seen = [request for engine in (*fleet.prefills, *fleet.decodes) for request in engine.requests]
    assert {request.headers["Authorization"] for request in seen} == {f"Bearer {ENGINE_KEY}"}


async def test_a_key_that_is_taken_out_of_the_file_is_refused_from_then_on(fleet, tmp_path):
    keys = ApiKeys(key_file(tmp_path / "keys", KEY, ENGINE_KEY))
    async with in_front(fleet, keys) as address:
        url = f"http://{address}/v1/models"
        for status in (200, 401):
            async with fleet.http.get(url, headers=bearing(KEY)) as response:
                assert response.status == status
            (tmp_path / "keys").write_text(ENGINE_KEY)


async def test_clients_are_served_over_tls(fleet, ca):
    async with in_front(fleet, tls=Tls(ca.files("gateway"))) as address:
        url = f"https://{address}/v1/completions"
        context = Tls(TlsFiles(ca=ca.pem)).client_context()
        async with fleet.http.post(url, json=BODY, ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await fleet.http.post(url, json=BODY)


@contextlib.asynccontextmanager
async def https_engine(tls: Tls) -> AsyncIterator[WorkerRef]:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_post("/leg", answer)
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls.server_context()).start()
    yield WorkerRef("p0", "i1", f"https://127.0.0.1:{runner.addresses[0][1]}", "127.0.0.1:1")
    await runner.cleanup()


async def post_leg(worker: WorkerRef, tls: Tls | None) -> str:
    engines = EngineClient(GatewaySettings(), Counts(), tls)
    try:
        response = await engines.post(worker, "/leg", b"{}", {}, 5.0)
        text = await response.text()
        response.close()
        assert await engines.alive(worker)
        return text
    finally:
        await engines.close()


async def test_workers_are_called_over_mutual_tls(ca, tmp_path):
    """A stranger's certificate and none are failed legs that name the worker, and nothing was reached."""
    stranger = authority(tmp_path, "stranger")
    async with https_engine(Tls(ca.files("engine", require_client_cert=True))) as worker:
        assert await post_leg(worker, Tls(ca.files("gateway"))) == "ok"
        theirs = dataclasses.replace(stranger.files("other"), ca=ca.pem)
        for tls in (Tls(TlsFiles(ca=ca.pem)), Tls(theirs), Tls(stranger.files("third")), None):
            with pytest.raises(LegError, match="p0"):
                await post_leg(worker, tls)
