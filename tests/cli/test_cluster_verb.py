"""`eldr cluster` where no vLLM server comes up, and where nothing runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eldr.cluster.procfs import read_processes


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eldr.cli.main", "cluster", *words], capture_output=True, text=True, timeout=90
    )


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: nothing\ndecode: 1\nrouter: {args: [--policy=none-such]}\n")
    return f"--config={path}"


def test_where_nothing_runs_down_is_done_and_status_says_so(config: str) -> None:
    down = run("down", config)
    assert (down.returncode, "no cluster runs" in down.stdout) == (0, True)
    status = run("status", config, "--json")
    assert (status.returncode, json.loads(status.stdout)) == (3, {"phase": "down"})


def test_a_process_that_does_not_come_up_is_named_with_its_log_and_nothing_is_left(
    config: str, tmp_path: Path
) -> None:
    up = run("up", config)
    assert up.returncode == 1
    assert "did not come up: router ended with status" in up.stderr
    assert "none-such" in up.stderr
    status = run("status", config)
    assert status.returncode == 3
    assert "the last one failed: router ended" in status.stdout
    assert [pid for pid in read_processes() if str(tmp_path) in words_of(pid)] == []


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_file_of_another_program_in_its_place_is_an_error_and_stays(config: str, tmp_path: Path) -> None:
    state = tmp_path / "eldr-cluster/cluster.json"
    state.parent.mkdir()
    state.write_text("[]")
    status = run("status", config)
    assert status.returncode == 1
    assert "is no state of a cluster" in status.stderr
    assert state.read_text() == "[]"


def test_a_wrong_file_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models: m\n")
    refused = run("up", f"--config={path}")
    assert refused.returncode == 2
    assert "did you mean 'model'" in refused.stderr
