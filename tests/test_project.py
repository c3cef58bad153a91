"""Rules that hold for the project as a whole; docs/ARCHITECTURE.md gives their reasons."""

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import eldr
from eldr import patching
from eldr.cli import config, main

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for path in (ROOT / "eldr").rglob("*.py") if "v1" not in path.parts)
ENGINE_ONLY = {"vllm", "torch", "nixl", "triton"}

# What a folder of eldr/ may import: other folders of eldr/, then packages beside the standard library.
PURE = ({"numpy", "scipy"}, {"signature"})
ALLOWED = {
    "signature": (PURE[0], set()),
    "calibration": PURE,
    "routing": PURE,
    "rpc": ({"numpy", "grpc", "google", "grpc_tools", "structlog"}, {"signature", "routing", "v1"}),
    "client": ({"grpc", "google"}, {"signature", "routing", "rpc", "v1"}),
    "router": (
        {"numpy", "grpc", "google", "grpc_health", "grpc_reflection", "structlog"},
        {"signature", "calibration", "routing", "rpc", "client", "observability", "v1"},
    ),
    "gateway": (
        {"aiohttp", "grpc", "structlog"},
        {"signature", "routing", "rpc", "client", "observability"},
    ),
    "engine": (
        {"numpy", "grpc", "google", "grpc_health", "structlog", "transformers", *ENGINE_ONLY},
        {"signature", "placement", "routing", "rpc", "client", "observability", "v1"},
    ),
    # Of the engine only the names of what a decoder counts, which need no vLLM.
    "recording": (
        {"numpy", "aiohttp", "structlog"},
        {"signature", "calibration", "rpc", "client", "gateway", "engine"},
    ),
    "placement": ({"numpy", "scipy"}, set()),
    # The router that is simulated is the real one: its core has no wire, and its clock is passed in.
    "simulator": (
        {"numpy", "scipy", "yaml", "structlog"},
        {"signature", "calibration", "routing", "placement", "router", "rpc"},
    ),
    "plots": ({"numpy", "matplotlib"}, {"signature", "calibration", "placement", "simulator"}),
    "patching": (set(), set()),
    "cluster": ({"yaml"}, set()),
    "observability": ({"structlog", "prometheus_client"}, set()),
}
IO_MODULES = {
    *("asyncio", "http", "logging", "multiprocessing", "select", "selectors", "signal", "socket", "ssl"),
    *("subprocess", "threading", "time", "urllib"),
}
FILE_MODULES = {"io", "os", "pathlib", "shutil", "tempfile", "zipfile"}
# Reading and writing counts and profiles is calibration's job; nothing else there touches a file.
FILES_OF_CALIBRATION = {"atomic_file.py", "counts_file.py", "profile.py"}


def imports(path: Path) -> Iterator[str]:
    """Full names of all that a module imports, wherever in the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import has no module name here; the style rule forbids it.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT / "eldr").parts[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


IMPORTS = {path: sorted(imports(path)) for path in SOURCES}


def test_a_folder_imports_only_what_its_place_allows() -> None:
    wrong = []
    for path, names in IMPORTS.items():
        if folder_of(path) not in ALLOWED:
            continue
        packages, folders = ALLOWED[folder_of(path)]
        for name in names:
            top, *rest = name.split(".")
            if top == "eldr":
                allowed = rest[0] in {folder_of(path), *folders}
            else:
                allowed = top in packages or top in sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{name_of(path)}: {name}")
    assert wrong == []


def test_every_folder_has_its_rule() -> None:
    """`cli` and `demo` put all together, `testing` stands in for all but the engine, `v1` is generated."""
    folders = {path.parent.name for path in (ROOT / "eldr").glob("*/__init__.py")}
    assert folders - {"cli", "demo", "testing", "v1"} - set(ALLOWED) == set()


def test_only_the_engine_imports_vllm_and_torch() -> None:
    wrong = [
        f"{name_of(path)}: {name}"
        for path, names in IMPORTS.items()
        for name in names
        if folder_of(path) != "engine" and name.split(".")[0] in ENGINE_ONLY
    ]
    assert wrong == []


def test_pure_folders_do_no_io() -> None:
    wrong = []
    for path, names in IMPORTS.items():
        if folder_of(path) not in {"signature", "calibration", "routing"}:
            continue
        forbidden = IO_MODULES | (set() if path.name in FILES_OF_CALIBRATION else FILE_MODULES)
        wrong += [f"{name_of(path)}: {name}" for name in names if name.split(".")[0] in forbidden]
    assert wrong == []


def test_messages_stay_at_the_edge() -> None:
    """Only the codec, the clients and the services know protobuf; all others use domain types."""
    wrong = [
        f"{name_of(path)}: {name}"
        for path, names in IMPORTS.items()
        for name in names
        if folder_of(path) not in {"rpc", "client", "router", "engine", "testing"}
        and name.startswith("eldr.v1")
    ]
    assert wrong == []


def test_every_channel_and_server_takes_the_shared_options() -> None:
    """Cases 4.2, 4.3, 4.7: one setting for both ends (eldr.rpc.settings)."""
    wanted = {
        "insecure_channel": "channel_options",
        "secure_channel": "channel_options",
        "server": "server_options",
    }
    wrong, seen = [], set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            made = node.func.attr
            if made in wanted and ast.unparse(node.func.value) in {"grpc", "grpc.aio", "aio"}:
                seen.add(made)
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if wanted[made] not in options.get("options", ""):
                    wrong.append(f"{name_of(path)}:{node.lineno}: {made}")
    assert wrong == []
    assert {"insecure_channel", "server"} <= seen


def test_a_file_is_short_and_named_for_what_it_holds() -> None:
    wrong = []
    for path in [*SOURCES, *(ROOT / "integration").rglob("*.py")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 400 or path.stem in {"utils", "util", "helpers", "common", "misc"}:
            wrong.append(f"{name_of(path)}: {lines} lines")
    assert wrong == []


def test_everything_but_the_engine_imports_without_vllm() -> None:
    names = [
        module.name
        for module in pkgutil.walk_packages(eldr.__path__, "eldr.")
        if not module.name.startswith("eldr.engine")
    ]
    assert "eldr.routing.contract" in names
    for name in names:
        importlib.import_module(name)


def test_the_patches_come_with_the_package() -> None:
    """Under tox the suite runs on the built wheel, so this looks into it."""
    assert patching.bundled_series().patches


def verbs(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    for name, below in config.nested(command).items():
        yield from verbs(below, (*words, name))


@pytest.mark.parametrize("verb", sorted(main.VERBS))
def test_every_verb_explains_itself_and_its_flags(verb: str) -> None:
    command = importlib.import_module(f"eldr.cli.{verb}").command
    for words, found in verbs(command, (verb,)):
        result = CliRunner().invoke(main.cli, [*words, "--help"])
        assert result.exit_code == 0, result.output
        assert found.help, words
        for option in config.options(found).values():
            assert option.help, f"{' '.join(words)} {option.opts[0]} has no help"


def text_files() -> Iterator[tuple[Path, str]]:
    """Everything written by hand; the testbed's prompts and model are data."""
    roots = ["eldr", "protos", "patches", "integration", "tests", "docs"]
    paths = [path for root in roots for path in (ROOT / root).rglob("*")]
    paths += [path for path in ROOT.glob("*") if path.name != "eldr.egg-info"]
    paths += [*(ROOT / ".ci").glob("*")]
    for path in paths:
        data = any(part in {"__pycache__", "model", "prompts"} for part in path.parts)
        if path.is_file() and not data:
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_path_of_a_machine_and_no_registry_is_in_the_tree() -> None:
    folders = "|".join(("work", "root", "home", "opt/wheels", "opt/pypi"))
    hosts = "|".join(("pypi", "pythonhosted", "npmjs", "deb.debian", "download.pytorch"))
    pattern = re.compile(rf"(?<![\w.}}])/({folders})/|\b({hosts})\.(org|com)\b")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path, text in text_files()
        for match in pattern.finditer(text)
    ]
    assert found == []


def test_the_project_is_tied_to_no_ci_vendor() -> None:
    vendors = [".github", ".gitlab-ci.yml", ".travis.yml", ".circleci", "azure-pipelines.yml", "Jenkinsfile"]
    assert [name for name in vendors if (ROOT / name).exists()] == []
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_every_link_between_documents_leads_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path, text in text_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        if not (path.parent / target).exists()
    ]
    assert broken == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if ".tools tox &&" in line]
    assert len(commands) == 2
    assert "-e demo" in commands[0]
    assert commands[1] == (ROOT / ".ci/run").read_text().splitlines()[-1]


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their base names, and one of two equal ones would stop the run."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
