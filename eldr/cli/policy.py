"""`eldr policy`: the policy of a running router."""

import json
from collections.abc import Mapping

import click

from eldr.cli.calls import ask
from eldr.cli.options import policy_option, router_option
from eldr.client import PolicyStatus


@click.group(name="policy")
def command() -> None:
    """Show or change the routing policy of a running router."""


@command.command(name="get")
@router_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def get(router: str, as_json: bool) -> None:
    """Show the policy in force, its options, and the names that `set` takes."""
    status = ask(router, lambda client: client.get_policy())
    if as_json:
        click.echo(
            json.dumps(
                {"policy": status.policy, "options": dict(status.options), "available": status.available}
            )
        )
        return
    click.echo(_line(status))
    click.echo(f"available: {', '.join(status.available)}")


@command.command(name="set")
@click.argument("name")
@policy_option("-o", "--option")
@router_option
def set_(name: str, policy_options: Mapping[str, float], router: str) -> None:
    """Switch to the policy NAME from the next decision on. Options left out take their defaults."""
    click.echo(_line(ask(router, lambda client: client.set_policy(name, policy_options))))


def _line(status: PolicyStatus) -> str:
    options = " ".join(f"{key}={value:g}" for key, value in sorted(status.options.items()))
    return f"{status.policy} {options}".rstrip()
