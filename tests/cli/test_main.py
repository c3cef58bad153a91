"""Verbs and their settings: every source is honoured in its order, and nothing unknown passes (case 7.2)."""

import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from eldr.cli import config, main

PROBE = "probe"


@click.group()
def nested_verb() -> None:
    """A verb with verbs below it."""


@nested_verb.command("set")
@click.option("--power", type=click.FloatRange(0, 8), default=1.0)
def nested_set(power: float) -> None:
    """A verb below a verb."""
    click.echo(f"power={power!r}")


@click.command()
@click.option("--bind-port", type=click.IntRange(1, 65535), default=7700, show_default=True)
@click.option("--json", "as_json", is_flag=True)
@click.option("--ratio", type=float, default=0.5)
@click.option("--worker", "workers", multiple=True)
@click.option("--router", default="127.0.0.1:7700", envvar="ELDR_ROUTER")
@click.pass_context
def probe_verb(ctx: click.Context, **_settings: Any) -> None:
    """Prints its settings."""
    for name, value in main.effective(ctx).items():
        click.echo(f"{name}={value!r}")


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two verbs made for these tests take the place of the real ones, in a clean environment."""
    for name, command in {PROBE: probe_verb, "group": nested_verb}.items():
        module = ModuleType(f"eldr.cli.{name}")
        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"eldr.cli.{name}", module)
    monkeypatch.setattr(main, "VERBS", {PROBE: "Prints.", "group": "Groups.", "absent": "Lacks a package."})
    for name in [name for name in os.environ if name.startswith("ELDR_")]:
        monkeypatch.delenv(name)


def run(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    result = CliRunner().invoke(main.cli, list(arguments), env=dict(env or {}))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write(folder: Path, text: str) -> str:
    path = folder / "eldr.yaml"
    path.write_text(text)
    return str(path)


def test_help_lists_every_verb_and_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    result = run("--help")
    assert result.exit_code == 0
    assert [word for word in main.VERBS if word not in result.output] == []


def test_an_unknown_verb_is_refused_with_the_nearest_one() -> None:
    result = run("prob")
    assert result.exit_code == 2
    assert "unknown verb 'prob'; did you mean 'probe'?" in result.output


def test_an_unknown_verb_like_no_other_is_refused_with_all() -> None:
    assert "unknown verb 'xyz'; known: absent, group, probe" in run("xyz").output


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named 'aiohttp' in {name}", name="aiohttp")

    monkeypatch.setattr(main.importlib, "import_module", lacking)
    result = run("absent")
    assert result.exit_code == 1
    assert "`eldr absent` needs the package 'aiohttp'; install eldr[gateway] or eldr[engine]" in result.output


def test_a_bug_in_our_own_imports_is_not_called_a_missing_package() -> None:
    result = CliRunner().invoke(main.cli, ["absent"])
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "eldr.cli.absent"


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "probe: {bind-port: 1, ratio: 0.1, worker: [a, b]}")
    env = {"ELDR_CONFIG": path, "ELDR_PROBE_BIND_PORT": "2", "ELDR_PROBE_RATIO": "0.2"}
    result = run(PROBE, "--bind-port", "3", env=env)
    assert result.output.splitlines() == [
        "as_json=False",
        "bind_port=3",
        "ratio=0.2",
        "router='127.0.0.1:7700'",
        "workers=('a', 'b')",
    ]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("bind-port", "9", "bind_port=9"),
        ("json", "true", "as_json=True"),
        ("ratio", "0.25", "ratio=0.25"),
        ("worker", "w1", "workers=('w1',)"),
        ("router", "h:1", "router='h:1'"),
    ],
)
def test_every_setting_can_be_given_each_way_under_the_name_of_its_flag(
    tmp_path: Path, name: str, value: str, shown: str
) -> None:
    """Case 7.2: each key set to a non-default value, and observed."""
    variable = f"ELDR_PROBE_{name.upper().replace('-', '_')}"
    written = f"[{value}]" if name == "worker" else value
    flag = (f"--{name}",) if name == "json" else (f"--{name}", value)
    assert shown in run(PROBE, *flag).output
    assert shown in run(PROBE, env={variable: value}).output
    for key in (name, name.replace("-", "_")):
        path = write(tmp_path, f"probe: {{{key}: {written}}}")
        assert shown in run("--config", path, PROBE).output


def test_a_shared_variable_serves_a_verb_that_has_no_value_of_its_own() -> None:
    assert "router='a:1'" in run(PROBE, env={"ELDR_ROUTER": "a:1"}).output
    assert "router='b:2'" in run(PROBE, env={"ELDR_ROUTER": "a:1", "ELDR_PROBE_ROUTER": "b:2"}).output


def test_settings_of_a_nested_verb_come_from_all_sources(tmp_path: Path) -> None:
    path = write(tmp_path, "group: {set: {power: 2}}")
    assert "power=2.0" in run("--config", path, "group", "set").output
    assert "power=3.0" in run("--config", path, "group", "set", env={"ELDR_GROUP_SET_POWER": "3"}).output
    assert "power=4.0" in run("--config", path, "group", "set", "--power", "4").output


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prob: {}", "unknown verb 'prob'; did you mean 'probe'?"),
        ("probe: {bind_prt: 1}", "probe: unknown setting 'bind_prt'; did you mean 'bind_port'?"),
        ("probe: {as_json: true}", "unknown setting 'as_json'; did you mean 'json'?"),
        ("probe: {zzz: 1}", "unknown setting 'zzz'; known: bind_port, json, ratio, router, worker"),
        ("group: {set: {powr: 1}}", "group.set: unknown setting 'powr'; did you mean 'power'?"),
        ("group: {sett: {power: 1}}", "group: unknown setting 'sett'; did you mean 'set'?"),
        ("group: {set: 4}", "group.set: must be a mapping of settings"),
        ("probe: 7", "probe: must be a mapping of settings"),
        ("probe:", "probe: must be a mapping of settings"),
        ("[probe]", "must be a mapping of verbs to their settings"),
        ("probe: {ratio: }", "probe.ratio: must be one value, got nothing"),
        ("probe: {ratio: [1]}", "probe.ratio: must be one value, got [1]"),
        ("probe: {worker: w1}", "probe.worker: must be a list"),
        ("probe: {", "while parsing"),
    ],
)
def test_a_file_with_anything_unknown_stops_the_start(tmp_path: Path, text: str, error: str) -> None:
    """Case 7.2, in the file: also for a verb that is not the one that runs."""
    result = run("--config", write(tmp_path, text), PROBE)
    assert result.exit_code == 2
    assert error in result.output
    assert "bind_port=" not in result.output


@pytest.mark.parametrize("value", ["0", "70000", "1.5", "yes", "seven"])
def test_a_value_out_of_range_stops_the_start_whatever_its_source(tmp_path: Path, value: str) -> None:
    """Case 7.2: YAML's own types take the same checks as flags, so 1.5 is not cut to 1, nor yes read as 1."""
    path = write(tmp_path, f"probe: {{bind_port: {value}}}")
    for arguments, env in (
        ((PROBE, "--bind-port", value), {}),
        ((PROBE,), {"ELDR_PROBE_BIND_PORT": value}),
        (("--config", path, PROBE), {}),
    ):
        result = run(*arguments, env=env)
        assert result.exit_code == 2
        assert "--bind-port" in result.output


def test_an_unknown_flag_is_refused_with_the_nearest_one() -> None:
    result = run(PROBE, "--bind-prt", "1")
    assert result.exit_code == 2
    assert "--bind-port" in result.output


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("ELDR_PROBE_BIND_PRT", "ELDR_PROBE_BIND_PORT"),
        ("ELDR_PROB_BIND_PORT", "ELDR_PROBE_BIND_PORT"),
        ("ELDR_PROBE_AS_JSON", "ELDR_PROBE_JSON"),
        ("ELDR_ROUTR", "ELDR_ROUTER"),
        ("ELDR_CONFIGG", "ELDR_CONFIG"),
    ],
)
def test_an_unknown_variable_stops_the_start(variable: str, near: str) -> None:
    """Case 7.2, in the environment."""
    result = run(PROBE, env={variable: "1"})
    assert result.exit_code == 2
    assert f"unknown variable '{variable}'; did you mean '{near}'?" in result.output


def test_variables_of_other_verbs_and_of_no_verb_are_left_alone() -> None:
    assert run(PROBE, env={"ELDR_GROUP_SET_POWER": "2", "ELDR_PYTHON": "x", "HOME": "h"}).exit_code == 0


def test_a_file_may_configure_a_verb_whose_packages_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file serves the router's machine, which has no aiohttp, and the gateway's."""
    found = main.Verbs.get_command

    def lacking(self: main.Verbs, ctx: click.Context, name: str) -> click.Command | None:
        if name == "absent":
            raise main.MissingPackageError("`eldr absent` needs the package 'aiohttp'")
        return found(self, ctx, name)

    monkeypatch.setattr(main.Verbs, "get_command", lacking)
    path = write(tmp_path, "absent: {a: 1}\nprobe: {bind_port: 5}")
    assert "bind_port=5" in run("--config", path, PROBE).output


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml" in run("--config", str(tmp_path / "nowhere.yaml"), PROBE).output
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"probe: {router: \xff}")
    result = run("--config", str(path), PROBE)
    assert result.exit_code == 2
    assert str(path) in result.output


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert "bind_port=7700" in run("--config", write(tmp_path, ""), PROBE).output


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert metadata.version("eldr") in result.output


def test_a_suggestion_lists_all_where_nothing_is_near() -> None:
    assert config.suggestion("setting", "qqq", ["b", "a"]) == "unknown setting 'qqq'; known: a, b"
