"""`eldr policy`: the policy of a running router."""

import dataclasses
import json
from collections.abc import Mapping

import click

from eldr.cli.calls import ask
from eldr.cli.options import model_option, policy_option, router_option
from eldr.client import DecodeSharesFit, PolicyStatus


@click.group(name="policy")
def command() -> None:
    """Show or change the routing policy of a running router."""


@command.command(name="get")
@model_option
@router_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def get(model: str, router: str, as_json: bool) -> None:
    """Show the policy in force, its options, and the names that `set` takes."""
    status = ask(router, lambda client: client.get_policy(model))
    if as_json:
        click.echo(
            json.dumps(
                {
                    "policy": status.policy,
                    "options": dict(status.options),
                    "available": status.available,
                    "step_times": [dataclasses.asdict(fit) for fit in status.step_times],
                    "decode_shares": dataclasses.asdict(status.decode_shares),
                }
            )
        )
        return
    click.echo(_line(status))
    click.echo(f"available: {', '.join(status.available)}")
    for fit in status.step_times:
        click.echo(
            f"step time, {fit.group}: error {fit.error:.1%} over {fit.observations} observations, "
            f"{fit.outliers} outliers"
        )
    click.echo(_shares_line(status.decode_shares))


@command.command(name="set")
@click.argument("name")
@policy_option("-o", "--option")
@model_option
@router_option
def set_(name: str, policy_options: Mapping[str, float], model: str, router: str) -> None:
    """Switch to the policy NAME from the next decision on. Options left out take their defaults.

    Without --model it holds for every model, and for those to come.
    """
    click.echo(_line(ask(router, lambda client: client.set_policy(name, policy_options, model))))


def _shares_line(fit: DecodeSharesFit) -> str:
    if not fit.observations:
        return "decode shares: counts / tokens, no decode counts were seen"
    form = "learned" if fit.learned else "counts / tokens"
    return (
        f"decode shares: {form}, error {fit.error:.4f} a share over {fit.observations} requests "
        f"(counts / tokens: {fit.plain_error:.4f})"
    )


def _line(status: PolicyStatus) -> str:
    options = " ".join(f"{key}={value:g}" for key, value in sorted(status.options.items()))
    return f"{status.policy} {options}".rstrip()
