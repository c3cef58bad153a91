"""`eldr router`: the central service."""

import asyncio
import gc
import signal
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import structlog

from eldr.calibration.profile import Profile, ProfileError
from eldr.cli.main import effective
from eldr.cli.options import host_and_port, policy_option
from eldr.cli.security_options import (
    listener_tls,
    role_files_option,
    shown_token,
    tls_options,
    token_table,
)
from eldr.observability.listener import MetricsListener
from eldr.router.fleet import HealthLimits
from eldr.router.metrics import ROUTER, samples
from eldr.router.server import ListenError, RouterServer
from eldr.router.settings import RouterSettings
from eldr.routing.contract import PolicyError
from eldr.routing.registry import DEFAULT_POLICY
from eldr.rpc.calling import Caller
from eldr.rpc.serving import Gate
from eldr.rpc.tokens import Role

log = structlog.get_logger()

DEFAULTS = {field.name: field.default for field in fields(RouterSettings)}


@click.command(name="router")
@click.option(
    "--listen", default="127.0.0.1:7700", show_default=True, help="host:port; port 0 takes a free one."
)
@click.option("--policy", default=DEFAULT_POLICY, show_default=True, help="Policy to start with.")
@policy_option("--policy-option")
@click.option(
    "--profile",
    "profile_paths",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Profile made by `eldr fit`, for policies that need one; repeat it for more models.",
)
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC address of a worker to look for; repeat it. Workers may also register themselves.",
)
@click.option(
    "--discover",
    multiple=True,
    metavar="dns:///NAME:PORT",
    help="Name whose A and AAAA records are workers, such as a headless service; repeat it for more.",
)
@click.option(
    "--discover-period-s",
    type=float,
    default=DEFAULTS["discover_period_s"],
    show_default=True,
    help="Time between two look-ups of a name.",
)
@click.option(
    "--drain-limit-s",
    type=float,
    default=DEFAULTS["drain_limit_s"],
    show_default=True,
    help="Time that a draining worker gets to finish where the caller names none.",
)
@click.option(
    "--stale-s",
    type=float,
    default=HealthLimits().stale_s,
    show_default=True,
    help="A worker that is silent for longer gets no new work.",
)
@click.option(
    "--dead-s",
    type=float,
    default=HealthLimits().dead_s,
    show_default=True,
    help="A worker that is silent for longer counts as dead.",
)
@click.option(
    "--forget-s",
    type=float,
    default=HealthLimits().forget_s,
    show_default=True,
    help="A worker that is silent for longer is taken off the list; it may come back.",
)
@click.option(
    "--reservation-ttl-s",
    type=float,
    default=DEFAULTS["reservation_ttl_s"],
    show_default=True,
    help="Life of a decode booking that no report of its decoder carries.",
)
@click.option(
    "--prefill-ttl-s",
    type=float,
    default=DEFAULTS["prefill_ttl_s"],
    show_default=True,
    help="Life of a prefill booking that is not released.",
)
@click.option(
    "--min-coverage",
    type=float,
    default=DEFAULTS["min_coverage"],
    show_default=True,
    help="Least covered share of a prompt for its signature to steer.",
)
@click.option(
    "--report-period-s",
    type=float,
    default=DEFAULTS["report_period_s"],
    show_default=True,
    help="Longest time between two reports asked of a decoder.",
)
@click.option(
    "--probe-period-s",
    type=float,
    default=DEFAULTS["probe_period_s"],
    show_default=True,
    help="Time between two questions to a prefill worker.",
)
@click.option("--seed", type=int, default=DEFAULTS["seed"], show_default=True, help="Seed of random choices.")
@click.option(
    "--allow-worker",
    "allow_workers",
    multiple=True,
    metavar="CIDR|GLOB",
    help="Network or glob of host names that workers' addresses must match; repeat it.  [default: all]",
)
@click.option(
    "--registrations-per-s",
    type=float,
    default=DEFAULTS["registrations_per_s"],
    show_default=True,
    help="Registrations that one host may make; each of its workers makes one a second.",
)
@role_files_option
@tls_options
@click.option("--reflection", is_flag=True, help="Serve gRPC reflection, for grpcurl and the like.")
@click.option(
    "--notice-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="After SIGTERM, time between the health NOT_SERVING and the end.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve Prometheus' /metrics there (docs/metrics.md); port 0 takes a free one.",
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    listen: str,
    profile_paths: tuple[Path, ...],
    policy_options: Mapping[str, float],
    token_files: Mapping[Role, Path],
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    tls_require_client_cert: bool,
    stale_s: float,
    dead_s: float,
    forget_s: float,
    notice_s: float,
    metrics: str | None,
    **options: Any,
) -> None:
    """Serve routing decisions over gRPC.

    Services, calls and status codes: docs/protocol.md.
    """
    try:
        profiles = [Profile.load(path) for path in profile_paths]
        settings = RouterSettings(
            health=HealthLimits(stale_s, dead_s, forget_s), policy_options=policy_options, **options
        )
    except (ProfileError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--profile") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    tls = listener_tls(tls_cert, tls_key, tls_ca, tls_require_client_cert)
    gate = Gate(tls, token_table(token_files))
    caller = Caller(tls, shown_token(token_files.get(Role.WORKER), "--token-file worker"))
    log.info("settings", **effective(ctx))
    monitored = host_and_port("--metrics", metrics) if metrics else None
    try:
        asyncio.run(_serve(settings, profiles, gate, caller, listen, notice_s, monitored))
    except (PolicyError, ProfileError) as error:
        raise click.UsageError(str(error)) from error
    except ListenError as error:
        raise click.ClickException(str(error)) from error


async def _serve(
    settings: RouterSettings,
    profiles: list[Profile],
    gate: Gate,
    caller: Caller,
    listen: str,
    notice_s: float,
    monitored: tuple[str, int] | None,
) -> None:
    server = RouterServer(settings, profiles[0] if profiles else None, gate=gate, caller=caller)
    for profile in profiles[1:]:
        server.core.models.load_profile(profile)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, ended.set)
    await server.start(listen)
    # What start-up made stays for good; to scan it again and again would hold decisions up.
    gc.collect()
    gc.freeze()
    listener = None
    if monitored is not None:
        try:
            listener = MetricsListener(*monitored, ROUTER, lambda: samples(server.core))
        except OSError as error:
            await server.stop()
            raise ListenError(
                f"cannot listen on {':'.join(map(str, monitored))}: {error.strerror}"
            ) from error
        log.info("metrics_served", host=monitored[0], port=listener.port)
    await ended.wait()
    if listener is not None:
        await listener.close()
    await server.stop(notice_s)
