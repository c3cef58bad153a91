"""Counters of the router, readable by name and labels."""

from collections import Counter
from collections.abc import Mapping

Labels = tuple[tuple[str, str], ...]


class Counters:
    """Counts that only grow. Names start with `eldr_`; labels are keyword arguments."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, Labels]] = Counter()

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        """Adds to one counter, made at first use."""
        if not name.startswith("eldr_"):
            raise ValueError(f"counter names start with eldr_, got {name!r}")
        self._values[name, tuple(sorted(labels.items()))] += amount

    def value(self, name: str, **labels: str) -> int:
        """Value of one counter; 0 where it was never added to."""
        return self._values[name, tuple(sorted(labels.items()))]

    def total(self, name: str) -> int:
        """Sum of one counter over all its labels."""
        return sum(value for (key, _), value in self._values.items() if key == name)

    def snapshot(self) -> Mapping[tuple[str, Labels], int]:
        """Every counter as it stands."""
        return dict(self._values)
