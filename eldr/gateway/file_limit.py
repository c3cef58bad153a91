"""How many file descriptors the process may have, and how many requests fit into them."""

import resource
from collections.abc import Callable

FILES_PER_REQUEST = 3
"""A client's connection, and one to each of two workers at the turn from one leg to the next."""

SPARE_FILES = 64
"""For everything else."""


def raise_file_limit(
    read: Callable[[int], tuple[int, int]] = resource.getrlimit,
    write: Callable[[int, tuple[int, int]], None] = resource.setrlimit,
) -> int:
    """Raises the soft limit of open files to the hard one and returns it."""
    _, hard = read(resource.RLIMIT_NOFILE)
    write(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def requests_within(files: int) -> int:
    """Requests that can run at a time with so many files, at least one; negative `files` is no limit."""
    if files < 0:
        return 1 << 30
    return max(1, (files - SPARE_FILES) // FILES_PER_REQUEST)
