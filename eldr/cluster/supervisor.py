"""Starts local processes, waits for them to be ready, and leaves none behind."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from eldr.cluster.ending import end_trees
from eldr.cluster.errors import ClusterError
from eldr.cluster.procfs import cpu_seconds

GRACE_S = 15.0
POLL_S = 0.25
LOG_TAIL_LINES = 30
WATCHDOG_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: a name that is unique in its supervisor, the words, and variables over the parent's.

    A job ends by itself with status 0; a server does not end by itself.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    is_job: bool = False


class ManagedProcess:
    """A running child: leader of a process group of its own, its output in a log file.

    Not of a session: Linux schedules each session as a unit (autogroups), and 6.18 was seen to starve one of them
    for minutes where several shared a core (docs/engine.md).
    """

    def __init__(self, command: Command, log_path: Path) -> None:
        self.command = command
        self.log_path = log_path
        self.started = time.monotonic()
        with log_path.open("ab") as log:
            self._child = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def name(self) -> str:
        """The command's name."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Pid, and id of its process group."""
        return self._child.pid

    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._child.poll()

    def reap(self) -> None:
        """Waits for an ended child."""
        self._child.wait()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


class Supervisor:
    """Owns child processes from start to end; a context manager.

    Leaving the context ends them all, on errors and Ctrl-C too. A watchdog process does it where this process
    dies without leaving the context.
    """

    def __init__(self, log_dir: Path, grace_s: float = GRACE_S) -> None:
        self._log_dir = log_dir
        self._grace_s = grace_s
        self._processes: dict[str, ManagedProcess] = {}
        self._watchdog: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Supervisor":
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "eldr.cluster.watchdog", str(self._grace_s)],
            stdin=subprocess.PIPE,
            process_group=0,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(*self._processes)
        if self._watchdog is not None:
            self._watchdog.communicate(timeout=WATCHDOG_EXIT_S)

    def start(self, command: Command) -> ManagedProcess:
        """Starts a process. Raises ClusterError where the name is taken or the program cannot be run."""
        if self._watchdog is None:
            raise ClusterError("the supervisor was not entered")
        if command.name in self._processes:
            raise ClusterError(f"a process named {command.name!r} runs already")
        try:
            process = ManagedProcess(command, self._log_dir / f"{command.name}.log")
        except OSError as error:
            raise ClusterError(f"{command.name} cannot be started: {error}") from error
        self._processes[command.name] = process
        self._tell_watchdog("+", process.pid)
        return process

    def stop(self, *names: str) -> None:
        """Ends the named processes with all their descendants, together. Unknown names are ignored."""
        ending = [self._processes[name] for name in names if name in self._processes]
        end_trees([process.pid for process in ending], self._grace_s)
        for process in ending:
            process.reap()
            del self._processes[process.name]
        for process in ending:
            self._tell_watchdog("-", process.pid)

    def wait_ready(self, name: str, probe: Callable[[], bool], timeout_s: float) -> float:
        """Polls `probe` until it holds and returns the seconds since the process started.

        Raises ClusterError with the end of its log where a process of this supervisor dies or time runs out.
        """
        process = self._processes[name]
        while not probe():
            self.check()
            waited = time.monotonic() - process.started
            if waited > timeout_s:
                state = "done" if process.command.is_job else "ready"
                raise ClusterError(
                    f"{name} was not {state} in {timeout_s:.0f} s; end of {process.log_path}:\n"
                    f"{process.log_tail()}"
                )
            time.sleep(POLL_S)
        self.check()
        return time.monotonic() - process.started

    def wait_ended(self, name: str, timeout_s: float) -> float:
        """Waits for a job to end well, as `wait_ready` does for a server to be ready."""
        process = self._processes[name]
        return self.wait_ready(name, lambda: process.returncode() == 0, timeout_s)

    def check(self) -> None:
        """Raises ClusterError with the end of its log where a server has ended or a job has failed."""
        for process in self._processes.values():
            status = process.returncode()
            if status is not None and not (process.command.is_job and status == 0):
                raise ClusterError(
                    f"{process.name} ended with status {status}; end of {process.log_path}:\n"
                    f"{process.log_tail()}"
                )

    def pid(self, name: str) -> int:
        """Pid of a running process, which leads a process group of its own. Raises KeyError for an unknown name."""
        return self._processes[name].pid

    def cpu_seconds(self, *names: str) -> dict[str, float]:
        """CPU time in seconds since their start of the named processes, all their descendants included."""
        by_pid = cpu_seconds([self._processes[name].pid for name in names])
        return {name: by_pid[self._processes[name].pid] for name in names}

    def _tell_watchdog(self, sign: str, pid: int) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        try:
            self._watchdog.stdin.write(f"{sign}{pid}\n")
            self._watchdog.stdin.flush()
        except BrokenPipeError as error:
            raise ClusterError("the watchdog of the local processes ended") from error
