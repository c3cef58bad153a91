"""Finds the verb and its settings: flags over ELDR_<VERB>_<FLAG> variables over a YAML file."""

import difflib
import importlib
import sys
from typing import Any

import click
import yaml

VERBS = {
    "calibrate": "Record prefill and decode expert counts of a prompts file from live workers.",
    "demo": "Start a real cluster, compare policies on it, print one table.",
    "explain": "Score every decoder for a prompt, with reasons.",
    "fit": "Turn recorded counts into a profile.",
    "gateway": "Serve the OpenAI API in front of prefill and decode workers.",
    "patch": "Apply, check or revert the vLLM patches.",
    "policy": "Show or change the routing policy of a running router.",
    "router": "Serve routing decisions over gRPC.",
    "workers": "List, drain or remove the workers of a running router.",
}


class Verbs(click.Group):
    """Loads a verb's module only when it is asked for, so that no verb needs another's dependencies."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs, sorted."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb, or a usage error that suggests the nearest one."""
        if cmd_name not in VERBS:
            near = difflib.get_close_matches(cmd_name, VERBS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no verb {cmd_name!r}.{hint}", ctx)
        try:
            module = importlib.import_module(f"eldr.cli.{cmd_name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("eldr"):
                raise
            raise click.ClickException(
                f"`eldr {cmd_name}` needs the package {error.name!r}; install eldr[gateway] or eldr[engine]"
            ) from error
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help without importing any verb."""
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(VERBS.items()))


def _read_config(ctx: click.Context, _param: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise click.BadParameter(str(error)) from error
    if not isinstance(config, dict):
        raise click.BadParameter("must be a mapping of verbs to their settings")
    group = ctx.command
    assert isinstance(group, click.Group)
    for verb, settings in config.items():
        if verb not in VERBS:
            raise click.BadParameter(_unknown("verb", str(verb), list(VERBS)))
        if not isinstance(settings, dict):
            raise click.BadParameter(f"{verb}: must be a mapping of settings")
        command = group.get_command(ctx, verb)
        assert command is not None
        known = [str(option.name) for option in command.params]
        for key in settings:
            if key not in known:
                raise click.BadParameter(f"{verb}: {_unknown('setting', str(key), known)}")
    ctx.default_map = config


def _unknown(kind: str, word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"unknown {kind} {word!r}" + (
        f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    )


@click.group(
    cls=Verbs, context_settings={"auto_envvar_prefix": "ELDR", "help_option_names": ["-h", "--help"]}
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    callback=_read_config,
    is_eager=True,
    expose_value=False,
    envvar="ELDR_CONFIG",
    help="YAML file: verb -> setting -> value. Flags and ELDR_<VERB>_<FLAG> variables win over it.",
)
@click.version_option(package_name="eldr")
def cli() -> None:
    """Expert-aware decode routing for mixture-of-experts serving."""


def effective(ctx: click.Context) -> dict[str, Any]:
    """The verb's resolved settings, to be printed at start."""
    return {name: value for name, value in sorted(ctx.params.items()) if value is not None}


def main() -> None:
    """Entry point; a wrong setting ends with its name and what to do, not with a traceback."""
    sys.exit(cli())


if __name__ == "__main__":
    main()
