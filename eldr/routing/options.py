"""Options of policies: plain numbers with a default and a range."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eldr.routing.contract import PolicyError


@dataclass(frozen=True, slots=True)
class Option:
    """A number from `low` to `high`, both allowed."""

    default: float
    low: float
    high: float
    help: str


def resolve(policy: str, known: Mapping[str, Option], given: Mapping[str, float]) -> dict[str, float]:
    """Every known option with its given or default value. PolicyError on an unknown one or one out of range."""
    for name, value in given.items():
        if name not in known:
            takes = ", ".join(known) or "none"
            raise PolicyError(f"policy {policy}: unknown option {name!r}, it takes {takes}")
        option = known[name]
        if not math.isfinite(value) or not option.low <= value <= option.high:
            raise PolicyError(
                f"policy {policy}: option {name} must be {option.low:g} to {option.high:g}, got {value:g}"
            )
    return {name: float(given.get(name, option.default)) for name, option in known.items()}
