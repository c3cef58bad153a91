"""Roles per call: every RPC has its own, and a caller of another role learns nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from eldr.client import RouterClient, RouterError, WorkerClient, WorkerError, WorkerRole
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.rpc.access import PERMITTED
from eldr.rpc.calling import Caller
from eldr.rpc.serving import Gate
from eldr.rpc.tokens import Role, TokenFile, TokenTable
from eldr.testing.fake_services import FakeDecodeWorker, fake_info
from eldr.v1 import decode_pb2, fleet_pb2, prefill_pb2, routing_pb2

SECRETS = {role: f"{role}-secret-0123456789abcdef" for role in Role}
STRANGER = "stranger-secret-0123456789abcdef"

CALLS: dict[str, Callable[[RouterClient], Awaitable[object]]] = {
    "select_prefill": lambda client: client.select_prefill(),
    "register": lambda client: client.register(fake_info("d0", WorkerRole.DECODE)),
    "workers": lambda client: client.workers(),
    "drain": lambda client: client.drain("d0"),
    "remove": lambda client: client.remove("d0"),
    "get_policy": lambda client: client.get_policy(),
    "set_policy": lambda client: client.set_policy("jsq"),
    "get_profile": lambda client: client.get_profile(),
    "load_profile": lambda client: client.load_profile(b""),
    "watch_fleet": lambda client: anext(client.watch_fleet()),
}
MAY = {
    Role.WORKER: {"register"},
    Role.CLIENT: {"select_prefill", "workers", "get_policy", "get_profile", "watch_fleet"},
    Role.ADMIN: set(CALLS),
}


def token_of(folder: Path, secret: str) -> TokenFile:
    path = folder / secret.partition("-")[0]
    path.write_text(secret + "\n")
    return TokenFile(path, shows=True)


def table(folder: Path) -> TokenTable:
    return TokenTable({role: token_of(folder, secret) for role, secret in SECRETS.items()})


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[str]:
    """The address of a router that asks for tokens."""
    server = RouterServer(RouterSettings(), gate=Gate(tokens=table(tmp_path)))
    port = await server.start("127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await server.stop(grace_s=0.1)


async def refused_calls(router: str, token: TokenFile | None) -> dict[str, grpc.StatusCode]:
    """The calls that end for want of a role or a token, with their codes."""
    refused = {}
    async with RouterClient(router, caller=Caller(token=token)) as client:
        for name, call in CALLS.items():
            try:
                await call(client)
            except RouterError as error:
                if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    refused[name] = error.code
    return refused


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_makes_its_own_calls_and_no_others(router: str, role: Role, tmp_path: Path) -> None:
    refused = await refused_calls(router, token_of(tmp_path, SECRETS[role]))
    assert refused == dict.fromkeys(CALLS.keys() - MAY[role], grpc.StatusCode.PERMISSION_DENIED)


@pytest.mark.parametrize("secret", [None, STRANGER])
async def test_without_a_known_token_no_call_is_let_in(
    router: str, secret: str | None, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        refused = await refused_calls(router, token_of(tmp_path, secret) if secret else None)
    assert refused == dict.fromkeys(CALLS, grpc.StatusCode.UNAUTHENTICATED)
    assert "call_without_known_token" in {entry["event"] for entry in logs}
    assert "secret-0123" not in repr(logs)


async def test_health_is_told_without_a_token(router: str) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(router) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_refuses_the_drain_of_anyone_but_an_admin(tmp_path: Path) -> None:
    async with FakeDecodeWorker("d0", gate=Gate(tokens=table(tmp_path))) as worker:
        for role in Role:
            caller = Caller(token=token_of(tmp_path, SECRETS[role]))
            async with WorkerClient(worker.address, caller=caller) as client:
                assert (await client.get_info()).worker_id == "d0"
                if role is Role.ADMIN:
                    await client.drain()
                    continue
                with pytest.raises(WorkerError) as caught:
                    await client.drain()
                assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_router_with_tokens_reads_the_state_of_a_worker_with_tokens(tmp_path: Path) -> None:
    gate = Gate(tokens=table(tmp_path))
    shown = Caller(token=token_of(tmp_path, SECRETS[Role.WORKER]))
    async with FakeDecodeWorker("d0", gate=gate) as worker:
        server = RouterServer(RouterSettings(workers=(worker.address,)), gate=gate, caller=shown)
        port = await server.start("127.0.0.1:0")
        admin = Caller(token=token_of(tmp_path, SECRETS[Role.ADMIN]))
        async with RouterClient(f"127.0.0.1:{port}", caller=admin) as client:
            async for fleet in client.watch_fleet():
                if fleet.workers and fleet.workers[0].health == "live":
                    break
        await server.stop(grace_s=0.1)


def test_every_call_has_its_roles() -> None:
    """A new RPC needs a line in `eldr.rpc.access.PERMITTED`; until then it is for admins alone."""
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (decode_pb2, fleet_pb2, prefill_pb2, routing_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(PERMITTED) == methods
