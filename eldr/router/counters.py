"""Counters and gauges of the router, readable by name and labels."""

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


class Gauges:
    """Numbers that go up and down, under the same rules as `Counters`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, Labels], float] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        """Replaces one gauge's value."""
        if not name.startswith("eldr_"):
            raise ValueError(f"gauge names start with eldr_, got {name!r}")
        self._values[name, tuple(sorted(labels.items()))] = value

    def value(self, name: str, **labels: str) -> float | None:
        """Value of one gauge; None where it was never set."""
        return self._values.get((name, tuple(sorted(labels.items()))))

    def clear(self, name: str, **labels: str) -> None:
        """Forgets the gauges of a name that have these labels, whatever their others."""
        asked = set(labels.items())
        self._values = {
            key: value for key, value in self._values.items() if key[0] != name or not asked <= set(key[1])
        }

    def snapshot(self) -> Mapping[tuple[str, Labels], float]:
        """Every gauge as it stands."""
        return dict(self._values)
