"""Ends a supervisor's processes when the supervisor itself dies, even by SIGKILL.

Runs as `python -m eldr.cluster.watchdog GRACE_S` and reads `+PID` and `-PID` lines from a pipe whose other
end only the supervisor holds. The end of the pipe is the supervisor's death: everything still on the list is
ended.
"""

import signal
import sys
from collections.abc import Iterable

from eldr.cluster.ending import end_trees


def watch(lines: Iterable[str]) -> list[int]:
    """The roots that are left when the lines end."""
    roots: list[int] = []
    for line in lines:
        sign, pid = line[0], int(line[1:])
        if sign == "+":
            roots.append(pid)
        elif sign == "-" and pid in roots:
            roots.remove(pid)
    return roots


def main() -> None:
    """Entry point. Signals meant for the supervisor do not end the watchdog; the end of the pipe does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_trees(watch(sys.stdin), float(sys.argv[1]))


if __name__ == "__main__":
    main()
