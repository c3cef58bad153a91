"""`eldr gateway` as a process: settings, readiness, the end."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from eldr.cli.gateway import command
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.testing.fake_engine import FakeEngine, FakeTransfers
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.faults import Pause

BODY = {"model": "fake", "prompt": "one two", "max_tokens": 3, "stream": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "8000"], "must be host:port, got '8000'"),
        (["--router", "a:1,b"], "must be host:port, got 'b'"),
        (["--handoff-timeout", "29"], "handoff_timeout_s must be 0.001 to 20, got 29"),
        (["--attempts", "0"], "attempts must be 1"),
        (["--record-counts", "x", "--record-share", "2"], "share must be above 0 and at most 1, got 2"),
    ],
)
def test_a_wrong_setting_is_named(arguments, said):
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_an_address_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(command, ["--listen", address])
    assert result.exit_code == 1
    assert f"cannot listen on {address}" in result.output


class Gateway:
    """A running `eldr gateway` in front of one prefill and one decode worker."""

    def __init__(self, files: int | None = None) -> None:
        self.files = files
        transfers = FakeTransfers()
        self.prefill = FakeEngine("p0", transfers)
        self.decode = FakeEngine("d0", transfers)
        self.transfers = transfers

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        await stack.enter_async_context(self.prefill)
        await stack.enter_async_context(self.decode)
        services = [
            await stack.enter_async_context(FakePrefillWorker("p0", http_url=self.prefill.url)),
            await stack.enter_async_context(FakeDecodeWorker("d0", http_url=self.decode.url)),
        ]
        router = RouterServer(RouterSettings(workers=tuple(service.address for service in services)))
        router_port = await router.start("127.0.0.1:0")
        stack.push_async_callback(router.stop, 0.0, 0.0)
        self.process = await asyncio.create_subprocess_exec(
            *(("prlimit", f"--nofile={self.files}") if self.files else ()),
            sys.executable,
            *("-m", "eldr.cli.main", "gateway", "--listen", "127.0.0.1:0", "--grace", "5"),
            *("--router", f"127.0.0.1:{router_port}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        stack.push_async_callback(self.end)
        self.url = f"http://{await self.listening()}"
        reader = asyncio.create_task(self.process.stdout.read())
        stack.callback(reader.cancel)
        self.http = await stack.enter_async_context(aiohttp.ClientSession())

    async def listening(self) -> str:
        """The address out of the log line that says so."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if b"gateway_started" in line:
                return line.decode().split("listen=")[1].split()[0]
        raise AssertionError("the gateway did not start")

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            while True:
                async with self.http.get(self.url + "/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with contextlib.AsyncExitStack() as stack:
        running = Gateway()
        await running.start(stack)
        yield running


async def test_a_running_stream_outlives_sigterm_and_the_process_ends_well(gateway):
    """Case 7.3."""
    await gateway.ready()
    gateway.decode.pauses["token"] = pause = Pause()
    async with gateway.http.post(gateway.url + "/v1/completions", json=BODY) as response:
        await pause.wait_reached()
        gateway.process.send_signal(signal.SIGTERM)
        pause.go_on()
        events = (await response.read()).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert await gateway.process.wait() == 0


async def test_a_second_signal_cuts_the_stream_with_an_error_event(gateway):
    """Case 7.3."""
    await gateway.ready()
    gateway.decode.pauses["token"] = pause = Pause()
    async with gateway.http.post(gateway.url + "/v1/completions", json=BODY) as response:
        await pause.wait_reached()
        gateway.process.send_signal(signal.SIGTERM)
        gateway.process.send_signal(signal.SIGINT)
        events = (await response.read()).decode().strip().split("\n\n")
    assert "shutting down" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert await gateway.process.wait() == 0


async def test_more_streams_than_file_descriptors_end_well_or_in_a_named_refusal():
    """Case 7.5: 256 descriptors, 500 streams at once; afterwards as many are open as before."""
    async with contextlib.AsyncExitStack() as stack:
        gateway = Gateway(files=256)
        await gateway.start(stack)
        await gateway.ready()
        before = gateway.open_files()
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def stream() -> int:
            async with http.post(gateway.url + "/v1/completions", json=BODY) as response:
                text = (await response.read()).decode()
                assert response.status != 200 or text.strip().endswith("data: [DONE]"), text
                return response.status

        statuses = Counter(await asyncio.gather(*(stream() for _ in range(500))))
        assert set(statuses) <= {200, 429, 503}
        assert statuses[200] > 100
        await http.close()
        async with asyncio.timeout(20):
            while gateway.open_files() > before + 4:  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.2)
        assert gateway.process.returncode is None
