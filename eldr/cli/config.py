"""Settings that do not come as flags: ELDR_<VERB>_<FLAG> variables and a YAML file. Unknown ones are refused."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

SHARED_VARIABLES = (
    "ELDR_CONFIG",
    "ELDR_PYTHON",
    "ELDR_ROUTER",
    "ELDR_TLS_CA",
    "ELDR_TLS_CERT",
    "ELDR_TLS_KEY",
    "ELDR_TOKEN_FILE",
)
"""Variables that belong to no single verb. ELDR_PYTHON is read by `integration/environment.py`."""


def suggestion(kind: str, word: str, known: Iterable[str]) -> str:
    """Says that `word` is unknown, with the nearest known word, or all of them where none is near."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(words)}"
    return f"unknown {kind} {word!r}; {hint}"


def options(command: click.Command) -> dict[str, click.Option]:
    """Options of a verb by setting name: the flag in snake case."""
    found = {}
    for option in command.params:
        if isinstance(option, click.Option):
            flag = next(flag for flag in option.opts if flag.startswith("--"))
            found[flag.removeprefix("--").replace("-", "_")] = option
    return found


def nested(command: click.Command) -> Mapping[str, click.Command]:
    """Verbs below a verb, by name."""
    return command.commands if isinstance(command, click.Group) else {}


def bind_variables(command: click.Command, prefix: str) -> None:
    """Names a variable of every option after its flag, nested verbs included; it wins over a shared one."""
    for name, option in options(command).items():
        own = f"{prefix}_{name}".upper()
        shared = [other for other in _names(option) if other != own]
        option.envvar = [own, *shared]
    for name, below in nested(command).items():
        bind_variables(below, f"{prefix}_{name}".replace("-", "_"))


def variables(command: click.Command) -> set[str]:
    """Variables that a verb reads, nested verbs included."""
    found: set[str] = set()
    for option in options(command).values():
        found.update(_names(option))
    return found.union(*map(variables, nested(command).values()))


def _names(option: click.Option) -> list[str]:
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or [])


def check_variables(
    environment: Iterable[str], verbs: Iterable[str], verb: str, command: click.Command
) -> None:
    """Raises UsageError on an ELDR_ variable that `verb` does not read, unless it is another verb's."""
    known = {*SHARED_VARIABLES, *variables(command)}
    others = tuple(f"ELDR_{other.upper()}_" for other in verbs if other != verb)
    for name in sorted(environment):
        if name.startswith("ELDR_") and name not in known and not name.startswith(others):
            raise click.UsageError(suggestion("variable", name, known))


def read_file(path: Path) -> dict[str, Any]:
    """The file's mapping of verbs to their settings, keys not checked yet."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise click.UsageError(f"{path}: must be a mapping of verbs to their settings")
    return {str(verb): settings for verb, settings in content.items()}


def defaults(command: click.Command, settings: object, where: str) -> dict[str, Any]:
    """Click's default map for a verb from its part of the file.

    Values become text, so that they meet the same checks as flags do. Raises UsageError on unknown keys and on
    values of another shape; `where` names the place in the file.
    """
    if not isinstance(settings, dict):
        raise click.UsageError(f"{where}: must be a mapping of settings")
    known, below = options(command), nested(command)
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name in known:
            found[str(known[name].name)] = _text(known[name], value, f"{where}.{name}")
        elif str(key) in below:
            found[str(key)] = defaults(below[str(key)], value, f"{where}.{key}")
        else:
            raise click.UsageError(f"{where}: {suggestion('setting', name, [*known, *below])}")
    return found


def _text(option: click.Option, value: object, where: str) -> str | list[str]:
    several = option.multiple or option.nargs != 1
    if several and isinstance(value, list):
        return [_scalar(part, where) for part in value]
    if several:
        raise click.UsageError(f"{where}: must be a list")
    return _scalar(value, where)


def _scalar(value: object, where: str) -> str:
    if isinstance(value, (str, bool, int, float)):
        return str(value)
    raise click.UsageError(f"{where}: must be one value, got {'nothing' if value is None else repr(value)}")
