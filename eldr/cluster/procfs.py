"""Process trees and their CPU time, read from /proc (Linux)."""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process: its parent, its process group, whether it has exited, and its CPU time in clock ticks.

    `ticks` is user and system time of all its threads and of those children that it has waited for.
    """

    pid: int
    parent: int
    group: int
    exited: bool
    ticks: int


def parse_stat(text: str) -> ProcessStat:
    """A line of /proc/PID/stat. The name in parentheses may itself hold spaces and parentheses."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    return ProcessStat(
        pid=int(pid),
        parent=int(fields[1]),
        group=int(fields[2]),
        exited=fields[0] in "ZXx",
        ticks=sum(int(field) for field in fields[11:15]),
    )


def read_processes() -> dict[int, ProcessStat]:
    """All processes that can be read, by pid."""
    found = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = parse_stat((entry / "stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended between the listing and the reading
        found[stat.pid] = stat
    return found


def tree(root: int, processes: dict[int, ProcessStat]) -> list[ProcessStat]:
    """The living of the process group that `root` leads, and all their descendants.

    The group still names those whose parent is gone; descent finds those that began a group of their own.
    A later process with the pid of a gone root is not of its group, so it is not taken for it.
    """
    members = {pid for pid, stat in processes.items() if stat.group == root}
    while True:
        children = {pid for pid, stat in processes.items() if stat.parent in members} - members
        if not children:
            break
        members |= children
    return [processes[pid] for pid in sorted(members) if not processes[pid].exited]


def cpu_seconds(roots: list[int]) -> dict[int, float]:
    """CPU time in seconds since their start of each root's tree, user and system."""
    processes = read_processes()
    per_second = os.sysconf("SC_CLK_TCK")
    return {root: sum(stat.ticks for stat in tree(root, processes)) / per_second for root in roots}
