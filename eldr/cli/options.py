"""Options and small conversions that several verbs share."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from eldr.cli.security_options import caller_options

F = TypeVar("F", bound=Callable[..., Any])


def router_option(function: F) -> F:
    """`--router host:port`, default 127.0.0.1:7700, and how it is called: see `caller_options`."""
    function = caller_options(function)
    return click.option(
        "--router",
        default="127.0.0.1:7700",
        show_default=True,
        help="host:port of the router.",
        envvar="ELDR_ROUTER",
    )(function)


def model_option(function: F) -> F:
    """`--model NAME`, empty by default."""
    return click.option(
        "--model", default="", help="Served name of the model; may be left out where one is served."
    )(function)


def policy_option(*flags: str) -> Callable[[F], F]:
    """`KEY=NUMBER`, repeatable, as the parameter `policy_options`: a dict."""
    return click.option(
        *flags,
        "policy_options",
        multiple=True,
        metavar="KEY=NUMBER",
        callback=_numbers,
        help="Option of the policy; repeat it for more.",
    )


def _numbers(_ctx: click.Context, _param: click.Parameter, pairs: Sequence[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not key.strip():
            raise click.BadParameter(f"must be KEY=NUMBER, such as tau=0.1, got {pair!r}")
    return found


def host_and_port(flag: str, text: str) -> tuple[str, int]:
    """A listening address in its two parts. Raises BadParameter that names the flag."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 1 << 16):
        raise click.BadParameter(f"must be host:port, got {text!r}", param_hint=flag)
    return host.strip("[]"), int(port)
