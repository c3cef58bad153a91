"""`eldr cluster`: a fleet on this machine, described in one file."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import click
from rich.table import Table

from eldr.cli.calls import console
from eldr.cluster import ClusterError, ConfigError, http_ready, port_ready
from eldr.cluster.description import Description, load_description
from eldr.cluster.keeper import ClusterState, Phase, keep, keeper_words, read_state, runs

POLL_S = 0.2
DOWN_LIMIT_S = 60.0
EXIT_NOT_UP = 3

config_option = click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="YAML file that describes the cluster (docs/cluster.md).",
)


@click.group(name="cluster")
def command() -> None:
    """Run prefill and decode servers, router and gateway on this machine, as one file describes them.

    For several machines take Kubernetes or your own supervisor with the plain commands.
    """


def _description(path: Path) -> Description:
    try:
        return load_description(path)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error


def _state(work_dir: Path) -> ClusterState | None:
    try:
        return read_state(work_dir)
    except ClusterError as error:
        raise click.ClickException(str(error)) from error


@command.command(name="up")
@config_option
@click.option("--foreground", is_flag=True, help="Stay, and end the cluster with this process.")
def up(config_path: Path, foreground: bool) -> None:
    """Start everything and return when all of it is ready, with the addresses."""
    description = _description(config_path)
    if foreground:
        try:
            keep(description)
        except ClusterError as error:
            raise click.ClickException(str(error)) from error
        return
    work_dir = description.work_dir
    if runs(work_dir):
        raise click.ClickException(f"a cluster runs in {work_dir} already; `eldr cluster down` ends it")
    work_dir.mkdir(parents=True, exist_ok=True)
    log_path = work_dir / "keeper.log"
    with log_path.open("ab") as log:
        keeper = subprocess.Popen(
            keeper_words(config_path.resolve()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        state = _await_ready(work_dir, keeper, log_path)
    except KeyboardInterrupt:
        keeper.terminate()
        keeper.wait()
        raise
    click.echo(f"gateway {state.gateway}\nrouter  {state.router}\nlogs    {work_dir / 'logs'}")


def _await_ready(work_dir: Path, keeper: "subprocess.Popen[bytes]", log_path: Path) -> ClusterState:
    began, told = time.monotonic(), 0
    while True:
        time.sleep(POLL_S)
        ended = keeper.poll() is not None
        state = _state(work_dir)
        if state is not None and state.pid == keeper.pid:
            for name in state.done[told:]:
                click.echo(f"[{time.monotonic() - began:4.0f} s] {name} is ready")
            told = len(state.done)
            if state.phase is Phase.FAILED and ended:
                raise click.ClickException(f"the cluster did not come up: {state.error}")
            if state.phase is Phase.READY:
                return state
        if ended:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-10:])
            raise click.ClickException(f"the cluster did not come up; end of {log_path}:\n{tail}")


@command.command(name="down")
@config_option
def down(config_path: Path) -> None:
    """End every process of the cluster."""
    work_dir = _description(config_path).work_dir
    state = _state(work_dir)
    if state is None or not runs(work_dir):
        click.echo(f"no cluster runs in {work_dir}")
        return
    os.kill(state.pid, signal.SIGTERM)
    end = time.monotonic() + DOWN_LIMIT_S
    while runs(work_dir):
        if time.monotonic() > end:
            raise click.ClickException(f"process {state.pid} did not end within {DOWN_LIMIT_S:.0f} s")
        time.sleep(POLL_S)
    click.echo("every process has ended")


@command.command(name="status")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def status(ctx: click.Context, config_path: Path, as_json: bool) -> None:
    """Show what runs and answers. Ends with 0 where all does, 1 where something does not, 3 where nothing runs."""
    work_dir = _description(config_path).work_dir
    state = _state(work_dir)
    if state is None or not runs(work_dir):
        why = f" (the last one failed: {state.error})" if state is not None and state.error else ""
        click.echo(json.dumps({"phase": "down"}) if as_json else f"no cluster runs in {work_dir}{why}")
        ctx.exit(EXIT_NOT_UP)
    health = {"router": port_ready(state.router)()}
    health |= {name: http_ready(f"{url}/health")() for name, url in state.urls.items()}
    where = {"router": state.router, **state.urls}
    if as_json:
        click.echo(json.dumps({"phase": state.phase, "health": health, "addresses": where}, indent=2))
    else:
        table = Table("process", "address", "answers")
        for name, healthy in health.items():
            table.add_row(name, where[name], "yes" if healthy else "no")
        console().print(table)
    ctx.exit(0 if all(health.values()) else 1)
