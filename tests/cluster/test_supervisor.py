"""Processes are started, waited for and ended, whatever happens to the one who started them."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from eldr.cluster import ClusterError, Command, Supervisor
from eldr.cluster.procfs import read_processes, tree

LIMIT_S = 10.0

PARENT_OF_ONE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def python(name, source, **env):
    return Command(name, (sys.executable, "-c", textwrap.dedent(source)), env)


def await_true(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.01)


def says(process, word="\n"):
    return lambda: word in process.log_path.read_text()


def alive(pid):
    found = read_processes().get(pid)
    return found is not None and not found.exited


def test_leaving_the_context_ends_children_and_grandchildren(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        process = supervisor.start(python("parent", PARENT_OF_ONE))
        await_true(says(process))
        grandchild = int(process.log_path.read_text())
        assert alive(process.pid)
        assert alive(grandchild)
    assert not alive(process.pid)
    assert not alive(grandchild)


def test_an_exception_in_the_context_ends_the_children_and_goes_on(tmp_path):
    supervisor = Supervisor(tmp_path)

    def interrupted():
        with supervisor:
            process = supervisor.start(python("parent", PARENT_OF_ONE))
            await_true(says(process))
            started.append(process.pid)
            raise KeyboardInterrupt

    started: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not tree(started[0], read_processes())


def test_orphans_of_a_dead_child_are_ended_too(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        process = supervisor.start(python("parent", PARENT_OF_ONE))
        await_true(says(process))
        grandchild = int(process.log_path.read_text())
        os.kill(process.pid, signal.SIGKILL)
        await_true(lambda: process.returncode() is not None)
        assert alive(grandchild)
    assert not alive(grandchild)


def test_a_process_that_ignores_term_is_killed_after_the_grace_time(tmp_path):
    with Supervisor(tmp_path, grace_s=0.2) as supervisor:
        process = supervisor.start(python("stubborn", STUBBORN))
        await_true(says(process))
    assert process.returncode() == -signal.SIGKILL


def test_a_stopped_name_can_be_started_again(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        first = supervisor.start(python("one", PARENT_OF_ONE))
        with pytest.raises(ClusterError, match="'one' runs already"):
            supervisor.start(python("one", PARENT_OF_ONE))
        supervisor.stop("one", "unknown")
        assert not alive(first.pid)
        supervisor.start(python("one", PARENT_OF_ONE))


def test_a_program_that_does_not_exist_is_named(tmp_path):
    with Supervisor(tmp_path) as supervisor, pytest.raises(ClusterError, match="ghost cannot be started"):
        supervisor.start(Command("ghost", ("/nonexistent/program",)))


def test_waiting_for_a_process_that_dies_shows_its_status_and_the_end_of_its_log(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(python("broken", "print('no such model'); raise SystemExit(3)"))
        with pytest.raises(ClusterError, match=r"(?s)broken ended with status 3.*no such model"):
            supervisor.wait_ready("broken", lambda: False, LIMIT_S)


def test_waiting_for_one_process_notices_that_another_died(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(python("slow", PARENT_OF_ONE))
        supervisor.start(python("broken", "raise SystemExit(4)"))
        with pytest.raises(ClusterError, match="broken ended with status 4"):
            supervisor.wait_ready("slow", lambda: False, LIMIT_S)


def test_waiting_too_long_shows_the_limit_and_the_end_of_the_log(tmp_path):
    with Supervisor(tmp_path, grace_s=0.2) as supervisor:
        process = supervisor.start(python("slow", STUBBORN))
        await_true(says(process))
        with pytest.raises(ClusterError, match=r"(?s)slow was not ready in 0 s.*ready"):
            supervisor.wait_ready("slow", lambda: False, 0.0)


def test_a_job_may_end_by_itself_but_not_fail(tmp_path):
    with Supervisor(tmp_path) as supervisor:
        good = Command("good", (sys.executable, "-c", ""), is_job=True)
        bad = Command("bad", (sys.executable, "-c", "raise SystemExit(5)"), is_job=True)
        supervisor.start(good)
        supervisor.wait_ended("good", LIMIT_S)
        supervisor.check()
        supervisor.start(bad)
        with pytest.raises(ClusterError, match="bad ended with status 5"):
            supervisor.wait_ended("bad", LIMIT_S)


def test_variables_of_the_command_win_over_the_parents(tmp_path, monkeypatch):
    monkeypatch.setenv("ELDR_TEST_A", "parent")
    monkeypatch.setenv("ELDR_TEST_B", "parent")
    source = """
        import os, time
        print(os.environ["ELDR_TEST_A"], os.environ["ELDR_TEST_B"], flush=True)
        time.sleep(600)
    """
    with Supervisor(tmp_path) as supervisor:
        process = supervisor.start(python("env", source, ELDR_TEST_B="command"))
        await_true(says(process))
        assert process.log_path.read_text() == "parent command\n"


def test_cpu_time_counts_descendants(tmp_path):
    source = """
        import subprocess, sys, time
        busy = "import os\\nwhile os.times().user < 0.3: pass"
        subprocess.run([sys.executable, "-c", busy])
        print("done", flush=True)
        time.sleep(600)
    """
    with Supervisor(tmp_path) as supervisor:
        process = supervisor.start(python("busy", source))
        await_true(says(process, "done"))
        assert supervisor.cpu_seconds("busy")["busy"] >= 0.25


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_children_end_when_the_supervising_process_is_killed(tmp_path, number):
    source = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from eldr.cluster import Command, Supervisor
        with Supervisor(Path({str(tmp_path)!r}), grace_s=0.5) as supervisor:
            process = supervisor.start(Command("parent", (sys.executable, "-c", {PARENT_OF_ONE!r})))
            while "\\n" not in process.log_path.read_text():
                time.sleep(0.01)
            print(process.pid, process.log_path.read_text(), flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as owner:
        assert owner.stdout is not None
        child, grandchild = map(int, owner.stdout.readline().split())
        assert alive(child)
        assert alive(grandchild)
        owner.send_signal(number)
        owner.wait(LIMIT_S)
    await_true(lambda: not alive(child) and not alive(grandchild))
