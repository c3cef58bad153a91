"""The demo on real servers: a small run holds what the large one shows, and Ctrl-C leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time

import pytest

from eldr.cluster.procfs import read_processes, tree

pytestmark = pytest.mark.cluster

SMALL = ("--decode=2", "--rounds=1", "--requests=26", "--calibration=26", "--width=0", "--output-tokens=8")
LIMIT_S = 300.0


def start(tmp_path, *words, **pipes):
    argv = [sys.executable, "-m", "eldr.cli.main", "demo", f"--work-dir={tmp_path}", *words]
    return subprocess.Popen(argv, text=True, start_new_session=True, **pipes)


def log_tails(folder, lines=25):
    tails = [
        f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        for path in sorted(folder.glob("logs/*.log"))
    ]
    return "\n".join(tails)


def test_a_small_run_has_no_errors_and_equals_both_references(tmp_path):
    path = tmp_path / "out.json"
    with start(tmp_path, *SMALL, f"--json={path}") as child:
        assert child.wait() == 0, log_tails(tmp_path)
    result = json.loads(path.read_text())
    assert result["vllm_version"] == "0.32.0"
    assert result["outputs_identical"]
    assert result["signatures_exact"]
    assert result["checked"] == {"outputs": 4 * 26, "signatures": 4 * 26}
    assert list(result["policies"]) == ["round-robin", "jsq", "locality-band", "union-cost"]
    for figures in result["policies"].values():
        assert (figures["requests"], figures["errors"]) == (26, 0)
        # Of 64 experts per layer, each token picks 4.
        assert 4 <= figures["union_mean"] <= 64
        assert 0 < figures["tpot_ms"]["p50"] <= figures["tpot_ms"]["p95"] <= figures["tpot_ms"]["p99"]
        assert figures["cpu_ms_per_token"] > 0


def test_an_interrupt_while_servers_start_leaves_no_process_behind(tmp_path):
    with start(tmp_path, *SMALL, stdout=subprocess.PIPE) as child:
        try:
            before = await_servers(child)
            child.send_signal(signal.SIGINT)
            out, _ = child.communicate(timeout=LIMIT_S)
        finally:
            child.kill()
    assert child.returncode == 130
    assert "interrupted; every process was stopped" in out
    left = {pid for pid, stat in read_processes().items() if pid in before and not stat.exited}
    assert left == set()


def await_servers(child):
    """Pids of the demo and all below it, once its first server has started processes of its own."""
    end = time.monotonic() + LIMIT_S
    while True:
        members = {stat.pid for stat in tree(child.pid, read_processes())}
        # The demo, its watchdog, the API server, its resource tracker, the engine.
        if len(members) >= 5:
            return members
        assert child.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
