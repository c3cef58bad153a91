"""`eldr demo` reports, fails by name, cleans up, and survives impatient interrupts."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from eldr.cli import demo
from eldr.cluster import ClusterError
from eldr.cluster.procfs import read_processes
from eldr.demo.compare import OutputCheck, SignatureCheck
from eldr.demo.measure import PolicyFigures
from eldr.demo.outcome import Outcome

GOOD = Outcome(
    "0.32.0",
    {"jsq": PolicyFigures(200.0, 220.0, 230.0, 900.0, 44.0, 2.5, 100, 0)},
    OutputCheck(100, 0, ()),
    SignatureCheck(100, 0),
    0.9,
)


@pytest.fixture
def run(monkeypatch):
    """Invokes the command with a stand-in for the run; gives what it printed and what the run was made with."""

    def invoke(*words, result=GOOD):
        seen = []

        class FakeDemo:
            def __init__(self, settings, tree, work_dir, stages):
                assert work_dir.is_dir()
                seen.append((settings, work_dir))

            def run(self):
                if isinstance(result, BaseException):
                    raise result
                return result

        monkeypatch.setattr(demo, "Demo", FakeDemo)
        return CliRunner().invoke(demo.command, [str(word) for word in words]), seen

    return invoke


def test_a_good_run_prints_the_table_writes_json_and_leaves_no_folder(run, tmp_path):
    path = tmp_path / "out.json"
    outcome, seen = run("--json", path, "--policies", "jsq, random", "--decode", 2)
    assert outcome.exit_code == 0, outcome.output
    assert "outputs equal those of one ordinary vLLM server: yes" in outcome.output
    assert "decode = 2" in outcome.output
    assert json.loads(path.read_text()) == GOOD.as_json()
    settings, work_dir = seen[0]
    assert settings.policies == ("jsq", "random")
    assert not work_dir.exists()


def test_a_run_with_a_flaw_ends_with_status_1_and_still_reports(run, tmp_path):
    flawed = Outcome("0.32.0", GOOD.policies, OutputCheck(100, 0, ("r",)), GOOD.signatures, 0.9)
    path = tmp_path / "out.json"
    outcome, _ = run("--json", path, result=flawed)
    assert outcome.exit_code == 1
    assert json.loads(path.read_text())["outputs_identical"] is False


def test_a_failure_is_told_and_its_folder_kept_for_reading(run):
    outcome, seen = run(result=ClusterError("decode-2 ended with status 1"))
    assert outcome.exit_code == 1
    assert "Error: decode-2 ended with status 1" in outcome.output
    work_dir = seen[0][1]
    assert f"kept {work_dir}" in outcome.output
    work_dir.rmdir()


def test_a_chosen_work_folder_stays(run, tmp_path):
    outcome, seen = run("--work-dir", tmp_path / "work")
    assert outcome.exit_code == 0
    assert seen[0][1] == tmp_path / "work"
    assert (tmp_path / "work").is_dir()


def test_a_result_file_that_could_not_be_written_is_refused_before_the_run(run, tmp_path):
    outcome, seen = run("--json", tmp_path / "missing/out.json")
    assert outcome.exit_code == 2
    assert "--json: there is no folder" in outcome.output
    assert seen == []


def test_keep_keeps_the_temporary_folder(run):
    _, seen = run("--keep")
    seen[0][1].rmdir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--decode", 0), "decode must be 1 to 64, got 0"),
        (("--policies", "jqs"), "unknown policy 'jqs'"),
        (("--output-tokens", 1), "output_tokens must be 2 to 512, got 1"),
    ],
)
def test_a_setting_out_of_range_is_a_usage_error_by_name(run, words, message):
    outcome, seen = run(*words)
    assert outcome.exit_code == 2
    assert message in outcome.output
    assert seen == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_interrupts_in_a_row_still_stop_every_process(tmp_path, number):
    source = textwrap.dedent("""
        import sys
        from eldr.cli import demo
        from eldr.cluster import Command, Supervisor

        SERVER = '''
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), time.sleep(0.5), exit(0)))
        print("ready", flush=True)
        time.sleep(600)
        '''

        class Fake:
            def __init__(self, settings, tree, work_dir, stages):
                self.logs = work_dir

            def run(self):
                with Supervisor(self.logs) as supervisor:
                    process = supervisor.start(Command("server", (sys.executable, "-c", SERVER)))
                    supervisor.wait_ready("server", lambda: "ready" in process.log_path.read_text(), 10)
                    print("pid", process.pid, flush=True)
                    supervisor.wait_ready("server", lambda: False, 60)

        demo.Demo = Fake
        demo.command(sys.argv[1:])
    """)
    argv = [sys.executable, "-c", source, "--work-dir", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = ""
        while not line.startswith("pid"):
            line = child.stdout.readline()
        child.send_signal(number)
        log = Path(tmp_path / "server.log")
        while "asked" not in log.read_text():
            assert child.poll() is None
        child.send_signal(number)
        rest = child.stdout.read()
    assert child.returncode == 130
    assert "interrupted; every process was stopped" in rest
    assert int(line.split()[1]) not in read_processes()
