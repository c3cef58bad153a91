"""Shows how far a run is: a bar on a terminal, a line per finished stage everywhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

Advance = Callable[[], None]


class Stages:
    """Stages of a run, one after the other."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._started = clock()

    @contextmanager
    def stage(self, title: str, total: int) -> Iterator[Advance]:
        """One stage of `total` steps; the caller calls the yielded function at each."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        started = self._clock()
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
        self.line(f"{title}, {self._clock() - started:.0f} s")

    def line(self, text: str) -> None:
        """One line after the time since the run began."""
        self.console.print(
            f"[{self._clock() - self._started:5.0f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )
