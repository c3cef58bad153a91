"""`eldr gateway`: the OpenAI API in front of prefill and decode workers."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import structlog

from eldr.cli.main import effective
from eldr.cli.options import host_and_port
from eldr.cli.security_options import FILE, listener_tls, make_caller, shown_token, tls_options, token_file_of
from eldr.client import RouterClient
from eldr.gateway.access import ApiKeys
from eldr.gateway.bookings import Releases
from eldr.gateway.coordinator import Coordinator
from eldr.gateway.counters import Counts
from eldr.gateway.decoded import DecodedCounts
from eldr.gateway.engine_client import EngineClient
from eldr.gateway.file_limit import raise_file_limit, requests_within
from eldr.gateway.server import GatewayServer
from eldr.gateway.settings import GatewaySettings
from eldr.gateway.transfers import WorkerClients
from eldr.recording.live import DEFAULT_MAX_BYTES, DEFAULT_SHARE, LiveRecorder, LiveSettings
from eldr.rpc.calling import Caller
from eldr.rpc.security import Tls

log = structlog.get_logger()

SETTINGS = {
    "connect_timeout_s": "Connection to a worker, the wait for a free one included.",
    "prefill_timeout_s": "A whole prefill leg, its queue included.",
    "handoff_timeout_s": "Prefill reply to decode leg; inside the 30 s KV lease.",
    "first_token_timeout_s": "Start of a streaming decode leg to its first event.",
    "idle_timeout_s": "Between two chunks of a stream.",
    "decode_timeout_s": "A whole decode leg that does not stream.",
    "attempts": "Pairs of legs that are tried for one request.",
    "connections_per_worker": "Connections to one worker, at most.",
    "breaker_failures": "Failures in a row after which a worker gets nothing for a while.",
    "breaker_open_s": "That while; doubled at each failed probe, up to eight times.",
    "probe_after_s": "Silence of a worker after which its health is asked for.",
    "max_body_bytes": "Largest request body.",
    "read_timeout_s": "For a client to send its body.",
    "max_requests": "Requests that run at a time; more wait.",
    "max_waiting": "Requests that wait for a turn, at most; more are a 429.",
    "tenant_requests": "Of one tenant that run at a time.",
    "tenant_waiting": "Of one tenant that wait, at most.",
    "queue_timeout_s": "Longest wait for a turn.",
    "tenant_header": "Header that names the tenant, set by a trusted proxy; else the bearer token does.",
    "ordinary_fallback": "Let one decode worker serve alone what two legs cannot, instead of a 400.",
    "first_token_from_prefill": "Send the token that prefill samples before a decoder is chosen.",
    "learn_share": "Share of the requests from whose decode counts the router learns.",
}


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A flag for each field of GatewaySettings; those in seconds drop the `_s`."""
    for entry in reversed(fields(GatewaySettings)):
        flag = "--" + entry.name.removesuffix("_s").replace("_", "-")
        if isinstance(entry.default, bool):
            function = click.option(flag, entry.name, is_flag=True, help=SETTINGS[entry.name])(function)
            continue
        seconds = entry.name.endswith("_s")
        function = click.option(
            flag,
            entry.name,
            type=type(entry.default),
            default=entry.default,
            show_default=True,
            metavar="SECONDS"
            if seconds
            else {int: "INTEGER", float: "SHARE", str: "NAME"}[type(entry.default)],
            help=SETTINGS[entry.name],
        )(function)
    return function


@click.command(name="gateway")
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, help="host:port; port 0 takes a free one."
)
@click.option(
    "--router",
    default="127.0.0.1:7700",
    show_default=True,
    envvar="ELDR_ROUTER",
    help="host:port of the router; several, separated by commas, are tried in this order.",
)
@tls_options
@click.option(
    "--api-key-file",
    type=FILE,
    metavar="FILE",
    help="Keys that clients show as bearer tokens, one a line.  [default: everybody is let in]",
)
@click.option(
    "--engine-key-file",
    type=FILE,
    metavar="FILE",
    help="Key that the engines ask for (vllm serve --api-key); they see it instead of the client's.",
)
@click.option("--token-file", type=FILE, metavar="FILE", help="Token for the router and the workers.")
@click.option(
    "--fleet-tls-ca",
    type=FILE,
    metavar="FILE",
    help="Call router and workers over TLS; authorities (PEM) that sign their certificates.",
)
@click.option("--fleet-tls-cert", type=FILE, metavar="FILE", help="Certificate (PEM) to show them.")
@click.option("--fleet-tls-key", type=FILE, metavar="FILE", help="Private key (PEM) of --fleet-tls-cert.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for running requests after SIGTERM or Ctrl-C; a second signal ends it.",
)
@click.option(
    "--record-counts",
    "record_folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write expert counts of sampled requests there, for `eldr fit`; no text is kept.",
)
@click.option(
    "--record-share",
    type=float,
    default=DEFAULT_SHARE,
    show_default=True,
    help="Share of the requests that is sampled.",
)
@click.option(
    "--record-max-mib",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_BYTES >> 20,
    show_default=True,
    help="Disk space of the recorded files; the oldest are removed.",
)
@settings_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    listen: str,
    router: str,
    grace_s: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    tls_require_client_cert: bool,
    api_key_file: Path | None,
    engine_key_file: Path | None,
    token_file: Path | None,
    fleet_tls_ca: Path | None,
    fleet_tls_cert: Path | None,
    fleet_tls_key: Path | None,
    record_folder: Path | None,
    record_share: float,
    record_max_mib: int,
    **options: Any,
) -> None:
    """Serve the OpenAI API over prefill and decode workers.

    \b
    POST /v1/completions, /v1/chat/completions    streaming or not
    POST /tokenize, /detokenize                   passed on to a worker
    GET  /v1/models, /health, /version

    What is refused and why, the headers and the time limits: docs/gateway.md.
    """
    host, port = host_and_port("--listen", listen)
    routers = [text.strip() for text in router.split(",")]
    for text in routers:
        host_and_port("--router", text)
    try:
        settings = GatewaySettings(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    recording = None
    if record_folder is not None:
        try:
            recording = LiveSettings(record_folder, record_share, max_bytes=record_max_mib << 20)
        except ValueError as error:
            raise click.UsageError(f"--record-counts: {error}") from error
    fits = requests_within(raise_file_limit())
    if fits < settings.max_requests:
        log.warning(
            "max_requests_lowered", given=settings.max_requests, to=fits, why="open files (ulimit -n)"
        )
        settings = replace(settings, max_requests=fits)
    tls = listener_tls(tls_cert, tls_key, tls_ca, tls_require_client_cert)
    keys = ApiKeys(
        token_file_of(api_key_file, "--api-key-file"), shown_token(engine_key_file, "--engine-key-file")
    )
    caller = make_caller(fleet_tls_ca, fleet_tls_cert, fleet_tls_key, token_file)
    log.info("settings", **effective(ctx))
    asyncio.run(_serve(host, port, tls, keys, caller, routers, grace_s, settings, recording))


async def _serve(
    host: str,
    port: int,
    tls: Tls | None,
    keys: ApiKeys,
    caller: Caller,
    routers: list[str],
    grace_s: float,
    settings: GatewaySettings,
    recording: LiveSettings | None,
) -> None:
    counts = Counts()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(RouterClient(routers, caller=caller))
        clients = WorkerClients(caller)
        stack.push_async_callback(clients.close)
        engines = EngineClient(settings, counts, caller.tls)
        stack.push_async_callback(engines.close)
        releases = Releases(router, clients.release_transfer, counts)
        recorder = None
        if recording is not None:
            recorder = LiveRecorder(recording, counts, clients.decode_counts, router.workers)
            try:
                recorder.start()
            except OSError as error:
                raise click.ClickException(f"--record-counts {recording.folder}: {error.strerror}") from error
            stack.push_async_callback(recorder.stop)
        decoded = DecodedCounts(settings.learn_share, clients.decode_counts, counts)
        coordinator = Coordinator(engines, releases, settings, time.monotonic, recorder, decoded)
        server = GatewayServer(coordinator, releases, settings, version("eldr"), keys, tls)
        try:
            address = await server.start(host, port)
        except OSError as error:
            raise click.ClickException(
                f"cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
        log.info("gateway_started", listen=address, routers=routers)
        await _signalled(server)
        await server.stop(grace_s)


async def _signalled(server: GatewayServer) -> None:
    """Returns at the first SIGTERM or SIGINT; the second one ends the grace time."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            server.hurry()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await asked.wait()
