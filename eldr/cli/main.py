"""Finds the verb and its settings: flags over ELDR_<VERB>_<FLAG> variables over a YAML file."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from eldr.cli import config

VERBS = {
    "calibrate": "Record prefill and decode expert counts of a prompts file, live or offline.",
    "cluster": "Run a fleet on this machine, described in one file.",
    "demo": "Start a real cluster, compare policies on it, print one table.",
    "explain": "Score every decoder for a prompt, with reasons.",
    "fit": "Turn recorded counts into a profile.",
    "gateway": "Serve the OpenAI API in front of prefill and decode workers.",
    "inspect": "Show what a profile holds, in words, as JSON and in pictures.",
    "patch": "Apply, check or revert the vLLM patches.",
    "place": "Plan which expert lies on which expert-parallel rank, from recorded counts.",
    "policy": "Show or change the routing policy of a running router.",
    "refit": "Cluster newer counts, or for another number of decoders, in a profile's space.",
    "router": "Serve routing decisions over gRPC.",
    "simulate": "Compare policies on a modelled fleet.",
    "workers": "List, drain or remove the workers of a running router.",
}


class MissingPackageError(click.ClickException):
    """A verb needs a package that is not installed here."""


class Verbs(click.Group):
    """Loads a verb's module only when it is asked for, so that no verb needs another's dependencies."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, or a usage error that suggests the nearest one."""
        if cmd_name not in VERBS:
            raise click.UsageError(config.suggestion("verb", cmd_name, VERBS), ctx)
        try:
            module = importlib.import_module(f"eldr.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("eldr"):
                raise
            raise MissingPackageError(
                f"`eldr {cmd_name}` needs the package {error.name!r}; install eldr[gateway] or eldr[engine]"
            ) from error
        command: click.Command = module.command
        config.bind_variables(command, f"ELDR_{cmd_name}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help without importing any verb."""
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="ELDR_CONFIG",
    help="YAML file: verb -> setting -> value. Flags and ELDR_<VERB>_<FLAG> variables win over it.",
)
@click.version_option(package_name="eldr")
@click.pass_context
def cli(ctx: click.Context, config_path: Path | None) -> None:
    """Expert-aware decode routing for mixture-of-experts serving."""
    verb, group = str(ctx.invoked_subcommand), ctx.command
    assert isinstance(group, Verbs)
    command = group.get_command(ctx, verb)
    assert command is not None
    config.check_variables(os.environ, VERBS, verb, command)
    if config_path is not None:
        ctx.default_map = _file_defaults(ctx, group, verb, config_path)


def _file_defaults(ctx: click.Context, group: Verbs, invoked: str, path: Path) -> dict[str, Any]:
    found = {}
    for verb, settings in config.read_file(path).items():
        try:
            command = group.get_command(ctx, verb)
        except MissingPackageError:
            # One file serves machines that have different extras.
            if verb == invoked:
                raise
            continue
        except click.UsageError as error:
            raise click.UsageError(f"{path}: {error.message}", ctx) from error
        assert command is not None
        found[verb] = config.defaults(command, settings, f"{path}: {verb}")
    return found


def effective(ctx: click.Context) -> dict[str, Any]:
    """The verb's resolved settings, to be printed at start."""
    return {name: value for name, value in sorted(ctx.params.items()) if value is not None}


def main() -> None:
    """Entry point; a wrong setting ends with its name and what to do, not with a traceback."""
    sys.exit(cli())


if __name__ == "__main__":
    main()
