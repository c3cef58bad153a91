"""Options and small conversions that several verbs share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def router_option(function: F) -> F:
    """`--router host:port`, default 127.0.0.1:7700."""
    return click.option(
        "--router",
        default="127.0.0.1:7700",
        show_default=True,
        help="host:port of the router.",
        envvar="ELDR_ROUTER",
    )(function)
