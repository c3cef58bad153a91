"""Recorded arrival times, read from CSV or JSON lines."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

COLUMN = "seconds"


class ArrivalsError(ValueError):
    """Arrival times that cannot be replayed; the message says where and why."""


def load_arrivals(path: Path) -> tuple[float, ...]:
    """Arrival times in seconds from the start of the simulation, ascending.

    `.jsonl`: a number, or an object with the key `seconds`, per line. Anything else is CSV: a column headed `seconds`,
    or one column without a heading. Raises ArrivalsError for what is no number, not finite, negative, earlier than the
    line before, or a file without any; OSError where it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArrivalsError(f"{path.name} is no text: {error}") from error
    values = _json_lines(path.name, text) if path.suffix == ".jsonl" else _csv(path.name, text)
    return _checked(values, path.name)


def checked_arrivals(values: Sequence[object], where: str) -> tuple[float, ...]:
    """The same checks for times that are there already; places are counted from 1. Raises ArrivalsError."""
    return _checked(((f"entry {number}", value) for number, value in enumerate(values, 1)), where)


def _checked(values: Iterator[tuple[str, object]], where: str) -> tuple[float, ...]:
    times: list[float] = []
    for place, value in values:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ArrivalsError(f"{where}, {place}: {COLUMN} must be a number, got {value!r}")
        try:
            at_s = float(value)
        except (ValueError, OverflowError) as error:
            raise ArrivalsError(f"{where}, {place}: {COLUMN} must be a number, got {value!r}") from error
        if not math.isfinite(at_s) or at_s < 0:
            raise ArrivalsError(f"{where}, {place}: {COLUMN} must be finite and not negative, got {value}")
        if times and at_s < times[-1]:
            raise ArrivalsError(
                f"{where}, {place}: arrivals must ascend; {at_s:g} comes after {times[-1]:g}. Sort the file"
            )
        times.append(at_s)
    if not times:
        raise ArrivalsError(f"{where} has no arrivals")
    return tuple(times)


def _json_lines(name: str, text: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ArrivalsError(f"{name}, line {number}: no JSON: {error}") from error
        if isinstance(value, dict):
            if COLUMN not in value:
                raise ArrivalsError(f"{name}, line {number}: the key {COLUMN!r} is missing")
            value = value[COLUMN]
        yield f"line {number}", value


def _csv(name: str, text: str) -> Iterator[tuple[str, object]]:
    rows = csv.reader(text.splitlines())
    column: int | None = None
    for row in rows:
        if not any(cell.strip() for cell in row):
            continue
        cells = [cell.strip() for cell in row]
        if column is None and COLUMN in cells:
            column = cells.index(COLUMN)
            continue
        if column is None:
            if len(cells) > 1:
                raise ArrivalsError(
                    f"{name}, line {rows.line_num}: several columns and none is headed {COLUMN!r}"
                )
            column = 0
        if column >= len(cells):
            raise ArrivalsError(f"{name}, line {rows.line_num}: the column {COLUMN!r} is missing")
        yield f"line {rows.line_num}", cells[column]
