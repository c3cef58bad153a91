"""Ends process trees: TERM first, KILL for what stays."""

import os
import signal
import time
from collections.abc import Iterable

from eldr.cluster.procfs import read_processes, tree

POLL_S = 0.05
KILL_LIMIT_S = 10.0
"""How long a killed process may take to vanish, e.g. in an uninterruptible read."""


def end_trees(roots: Iterable[int], grace_s: float) -> list[int]:
    """Ends the trees of all `roots` (leaders of their process groups); returns the pids that had to be killed.

    A root gets SIGTERM first, so that it may end its own children; those that outlive it get SIGTERM then.
    What is left after `grace_s` seconds gets SIGKILL. Exited children of the caller stay zombies until it
    waits for them.
    """
    left = set(roots)
    asked: set[int] = set()
    end = time.monotonic() + grace_s
    while left:
        for root, pids in _living(left).items():
            heads = {root} if root in pids else pids
            _send(heads - asked, signal.SIGTERM)
            asked |= heads
        left = _wait(left)
        if time.monotonic() >= end:
            break
    killed: set[int] = set()
    end = time.monotonic() + KILL_LIMIT_S
    while left and time.monotonic() < end:
        for pids in _living(left).values():
            _send(pids, signal.SIGKILL)
            killed |= pids
        left = _wait(left)
    return sorted(killed)


def _living(roots: set[int]) -> dict[int, set[int]]:
    processes = read_processes()
    return {root: {stat.pid for stat in tree(root, processes)} for root in roots}


def _wait(roots: set[int]) -> set[int]:
    """Pauses where something lives and returns the roots whose trees still do."""
    left = {root for root, pids in _living(roots).items() if pids}
    if left:
        time.sleep(POLL_S)
    return left


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # ended by itself meanwhile
