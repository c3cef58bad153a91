"""`eldr cluster` on real servers: up, used, one lost, down, nothing left."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from eldr.cluster.procfs import read_processes

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eldr.cli.main", "cluster", *words],
        capture_output=True,
        text=True,
        timeout=400,
    )


def servers_below(pid: int) -> dict[str, int]:
    """Worker id of each vLLM API server that the keeper started, and its pid."""
    found = {}
    for process in read_processes().values():
        if process.parent == pid:
            words = Path(f"/proc/{process.pid}/cmdline").read_text()
            for name in ("prefill-0", "decode-0"):
                if f'"worker_id": "{name}"' in words:
                    found[name] = process.pid
    return found


def test_a_described_cluster_serves_shows_a_loss_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {ROOT / 'integration/testbed/model'}\ndecode: 1\nengine: {{kv_cache_mib: 64}}\n")
    config = f"--config={path}"
    try:
        up = run("up", config)
        assert up.returncode == 0, up.stderr
        assert "decode-0 is ready" in up.stdout
        again = run("up", config)
        assert again.returncode == 1
        assert "runs in" in again.stderr
        state = json.loads((tmp_path / "eldr-cluster/cluster.json").read_text())
        body = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{state['gateway']}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        status = run("status", config, "--json")
        assert status.returncode == 0, status.stdout
        os.kill(servers_below(state["pid"])["decode-0"], signal.SIGKILL)
        lost = run("status", config, "--json")
        assert lost.returncode == 1
        assert [name for name, answers in json.loads(lost.stdout)["health"].items() if not answers] == [
            "decode-0"
        ]
    finally:
        down = run("down", config)
    assert down.returncode == 0
    assert "every process has ended" in down.stdout
    assert state["pid"] not in {pid for pid, stat in read_processes().items() if not stat.exited}
    assert run("status", config).returncode == 3
