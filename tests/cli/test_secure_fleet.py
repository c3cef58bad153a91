"""Router, gateway and verbs as processes, with mutual TLS and tokens on every hop; and what their logs hold."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from eldr.cli import main
from eldr.rpc.security import Tls
from eldr.rpc.serving import Gate
from eldr.rpc.tokens import Role, TokenFile, TokenTable
from eldr.testing.certificates import authority
from eldr.testing.fake_engine import FakeEngine, FakeTransfers
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker

SECRETS = {role: f"{role}-secret-0123456789abcdef" for role in Role}
KEY = "client-key-secret-0123456789abcdef"
BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}


class Process:
    """`eldr` with these words; everything that it prints is kept."""

    def __init__(self) -> None:
        self.log = ""

    async def start(self, stack: contextlib.AsyncExitStack, *words: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "eldr.cli.main", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        stack.push_async_callback(self._end)

    async def until(self, event: str) -> str:
        """The rest of the line in which an event is logged."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.log += line.decode()
            if event in line.decode():
                return line.decode().split(event)[1]
        raise AssertionError(self.log)

    async def rest(self) -> str:
        """All that was printed; the process is asked to end first."""
        assert self._process.stdout is not None
        if self._process.returncode is None:
            self._process.terminate()
        self.log += (await self._process.stdout.read()).decode()
        await self._process.wait()
        return self.log

    async def _end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as found:
        yield found


async def verb(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "eldr.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return out.decode()


async def test_a_request_goes_through_a_fleet_where_every_hop_is_checked(stack, tmp_path: Path):
    ca = authority(tmp_path, "fleet")
    files = {}
    for role, secret in SECRETS.items():
        files[role] = tmp_path / role
        files[role].write_text(secret + "\n")
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")

    def own(name: str, prefix: str = "") -> tuple[str, ...]:
        cert, key = ca.sign(name)
        flags = (f"--{prefix}tls-cert", cert, f"--{prefix}tls-key", key, f"--{prefix}tls-ca", ca.pem)
        return tuple(map(str, flags))

    gate = Gate(
        Tls(ca.files("worker", require_client_cert=True)),
        TokenTable({role: TokenFile(path) for role, path in files.items()}),
    )
    transfers = FakeTransfers()
    engines = [FakeEngine(worker_id, transfers) for worker_id in ("p0", "d0")]
    for engine in engines:
        await stack.enter_async_context(engine)
    workers = [
        await stack.enter_async_context(FakePrefillWorker("p0", http_url=engines[0].url, gate=gate)),
        await stack.enter_async_context(FakeDecodeWorker("d0", http_url=engines[1].url, gate=gate)),
    ]
    router, gateway = Process(), Process()
    await router.start(
        stack,
        *("router", "--listen", "127.0.0.1:0", *own("router"), "--tls-require-client-cert"),
        *(word for role, path in files.items() for word in ("--token-file", f"{role}={path}")),
        *(word for worker in workers for word in ("--worker", worker.address)),
        *("--allow-worker", "127.0.0.0/8"),
    )
    port = (await router.until("router_started")).split("port=")[1].split()[0]
    address = f"127.0.0.1:{port}"
    await gateway.start(
        stack,
        *("gateway", "--listen", "127.0.0.1:0", "--router", address, *own("gateway")[:4]),
        *("--api-key-file", str(keys), "--token-file", str(files[Role.CLIENT])),
        *own("gateway-inside", "fleet-"),
    )
    url = "https://" + (await gateway.until("gateway_started")).split("listen=")[1].split()[0]
    context = Tls(ca.files("visitor")).client_context()
    async with aiohttp.ClientSession() as http, asyncio.timeout(30):
        while True:
            async with http.get(url + "/health", ssl=context) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.05)
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200)):
            async with http.post(
                url + "/v1/completions", json=BODY, headers=headers, ssl=context
            ) as response:
                assert response.status == status
    admin = (*own("operator"), "--token-file", str(files[Role.ADMIN]))
    listed = json.loads(await verb("workers", "--json", "--router", address, *admin))
    assert {worker["info"]["worker_id"] for worker in listed} == {"p0", "d0"}
    client = (*own("operator"), "--token-file", str(files[Role.CLIENT]))
    assert "the role client may not make this call" in await verb(
        "policy", "set", "jsq", "--router", address, *client
    )
    assert "this side needs tls ca" in await verb("policy", "get", "--router", address)
    printed = await gateway.rest() + await router.rest()
    assert "call_not_permitted" in printed
    assert "secret-0123" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("router", "--tls-key", "a"), "need --tls-cert"),
        (("router", "--tls-cert", "none.pem"), "tls cert needs tls key"),
        (("router", "--tls-cert", "none.pem", "--tls-key", "none.key"), "tls cert none.pem: No such file"),
        (("router", "--token-file", "boss=x"), "with a role of worker, client, admin"),
        (("router", "--token-file", "admin=none"), "token file none: No such file"),
        (("router", "--allow-worker", "10.0.0.0/99"), "allow_workers must be networks"),
        (("gateway", "--api-key-file", "none"), "--api-key-file: token file none: No such file"),
        (("gateway", "--fleet-tls-cert", "none.pem"), "tls cert needs tls key"),
        (("workers", "--token-file", "none"), "--token-file: token file none: No such file"),
        (("workers", "--tls-ca", "none"), "tls ca none: No such file"),
    ],
)
def test_wrong_options_end_with_what_is_wrong(words: tuple[str, ...], message: str):
    ended = CliRunner().invoke(main.cli, words)
    assert ended.exit_code != 0
    assert message in " ".join(ended.output.split())
