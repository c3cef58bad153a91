"""What the verbs that ask a running router share: one connection, and errors that say what to do."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
from rich.console import Console

from eldr.cli.security_options import caller
from eldr.client import CodecError, RouterClient, RouterError, RouterUnreachableError

Answer = TypeVar("Answer")


def ask(router: str, work: Callable[[RouterClient], Awaitable[Answer]]) -> Answer:
    """Runs `work` with a client of the router at host:port. Raises ClickException."""
    shown = caller()

    async def run() -> Answer:
        async with RouterClient(router, caller=shown) as client:
            return await work(client)

    try:
        return asyncio.run(run())
    except RouterUnreachableError as error:
        raise click.ClickException(
            f"no router answers at {router}: start `eldr router`, or name another with --router or ELDR_ROUTER "
            f"({error.detail})"
        ) from error
    except RouterError as error:
        raise click.ClickException(f"router {router}: {error.detail} ({error.code.name})") from error
    except CodecError as error:
        raise click.ClickException(f"router {router} speaks another version: {error}") from error


def number(value: Any, digits: int = 1) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def console() -> Console:
    """As wide as the terminal; wide enough for any table where the output goes elsewhere."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=200)
