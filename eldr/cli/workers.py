"""`eldr workers`: the fleet of a running router."""

import dataclasses
import json
from contextlib import aclosing
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from eldr.cli.calls import ask, console
from eldr.cli.options import router_option
from eldr.client import RouterClient, WorkerHealth, WorkerStatus


@click.group(name="workers", invoke_without_command=True)
@router_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, one object per worker.")
@click.pass_context
def command(ctx: click.Context, router: str, as_json: bool) -> None:
    """List the workers of a running router, or drain or remove one."""
    if ctx.invoked_subcommand is not None:
        return
    found = ask(router, lambda client: client.workers())
    if as_json:
        click.echo(json.dumps([_object(status) for status in found], indent=2))
    elif found:
        console().print(_table(found))
    else:
        click.echo("no worker is registered")


@command.command(name="drain")
@click.argument("worker_id")
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0),
    help="Longest time for what it still has to do. Default: the router's --drain-limit-s.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Return once the worker is gone.")
@router_option
@click.pass_context
def drain(ctx: click.Context, worker_id: str, limit_s: float | None, wait: bool, router: str) -> None:
    """Take WORKER_ID out of the fleet: no new work, time to finish, then gone.

    The engine itself reports that it drains, so that other routers leave it alone, too. Its restart joins again.
    """

    async def run(client: RouterClient) -> None:
        bookings = await client.drain(worker_id, limit_s)
        click.echo(f"{worker_id} is draining, {bookings} bookings left")
        if wait:
            await _gone(client, worker_id)
            click.echo(f"{worker_id} is gone")

    ask(_router(ctx, router), run)


async def _gone(client: RouterClient, worker_id: str) -> None:
    """Returns when no process of that id drains any longer: it has left, or another one has taken its place."""
    async with aclosing(client.watch_fleet()) as changes:
        async for fleet in changes:
            found = [status for status in fleet.workers if status.info.worker_id == worker_id]
            if not found or found[0].health in (WorkerHealth.LIVE, WorkerHealth.STARTING):
                return


@command.command(name="remove")
@click.argument("worker_id")
@router_option
@click.pass_context
def remove(ctx: click.Context, worker_id: str, router: str) -> None:
    """Forget WORKER_ID and its bookings. The same process is not let in again; a restarted one is."""
    if not ask(_router(ctx, router), lambda client: client.remove(worker_id)):
        raise click.ClickException(f"no worker {worker_id!r} is registered; `eldr workers` lists them")
    click.echo(f"{worker_id} is removed")


def _router(ctx: click.Context, router: str) -> str:
    """`--router` may stand before the nested verb as well as after it."""
    above = ctx.parent
    if above is not None and ctx.get_parameter_source("router") is ParameterSource.DEFAULT:
        return str(above.params["router"])
    return router


def _table(found: list[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "model", "role", "health"):
        table.add_column(name)
    for name in ("bookings", "running", "waiting", "kv %", "step ms", "union", "age s"):
        table.add_column(name, justify="right")
    table.add_column("http")
    table.add_column("reason")
    for status in found:
        state = status.state
        table.add_row(
            status.info.worker_id,
            status.info.served_model,
            status.info.role.value,
            status.health.value,
            str(status.bookings),
            str(state.running) if state else "-",
            str(state.waiting) if state else "-",
            f"{100 * state.kv_usage:.0f}" if state else "-",
            f"{1e3 * state.step_time_ewma_s:.1f}" if state else "-",
            f"{state.union_last:.1f}" if state else "-",
            f"{status.state_age_s:.1f}" if status.state_age_s >= 0 else "-",
            status.info.http_url,
            status.reason,
        )
    return table


def _object(status: WorkerStatus) -> dict[str, Any]:
    state = None
    if status.state is not None:
        state = dataclasses.asdict(dataclasses.replace(status.state, hit_frequency=None))
        del state["hit_frequency"]
        state["reservation_ids"] = sorted(state["reservation_ids"])
    return {
        "info": dataclasses.asdict(status.info),
        "health": status.health.value,
        "bookings": status.bookings,
        "state_age_s": status.state_age_s,
        "state": state,
        "reason": status.reason,
    }
