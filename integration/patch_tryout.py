"""Tries the patch series on another vLLM: what applies as is, at another line, and what no longer applies.

    python -m integration.patch_tryout            # the newest release
    python -m integration.patch_tryout 0.33.0     # that release; pip downloads its wheel (about 350 MB)
    python -m integration.patch_tryout PATH       # a wheel, a source tree or a site-packages folder

Nothing is written to any vLLM. Exit code 0 where every hunk applies, at whatever line; else 1.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from eldr.patching import PatchingError, Series, bundled_series, open_tree
from eldr.patching.record import FOLDER
from eldr.patching.unified_diff import Hunk

SHOWN_DIFFERENCES = 4

ReadFile = Callable[[str], bytes | None]
"""Content of a file by its path in the tree, None where there is no such file."""


class Fit(StrEnum):
    """How a hunk fits."""

    AS_IS = "applies as is"
    MOVED = "applies at another line"
    AMBIGUOUS = "fits at several lines"
    """The nearest one was taken: look at it."""
    FAILS = "no longer applies"


@dataclass(frozen=True, slots=True)
class HunkTrial:
    """One hunk of one patch. Lines count from 1; `details` say where and how the text differs."""

    patch: str
    path: str
    number: int
    line: int
    fit: Fit
    found_line: int = 0
    details: tuple[str, ...] = ()


@dataclass(slots=True)
class _File:
    """A file as the hunks so far have left it. `left_out` are failed hunks: their place, and their lines' growth."""

    lines: list[bytes]
    left_out: list[tuple[int, int]] = field(default_factory=list)

    def expected(self, hunk: Hunk) -> int:
        """Where the hunk stands if upstream has not moved it."""
        return hunk.new_at - sum(growth for place, growth in self.left_out if place < hunk.new_at)


def try_series(series: Series, read: ReadFile) -> list[HunkTrial]:
    """Every hunk in order. One that fails is left out, and those after it are tried on the rest."""
    contents = {path: read(path) for path in series.paths}
    files = {
        path: _File(content.splitlines(keepends=True))
        for path, content in contents.items()
        if content is not None
    }
    trials: list[HunkTrial] = []
    for patch in series.patches:
        for diff in patch.files:
            file = files.get(diff.path)
            moved = 0
            for number, hunk in enumerate(diff.hunks, 1):
                trial = HunkTrial(patch.name, diff.path, number, hunk.old_at + 1, Fit.FAILS)
                if file is None:
                    trials.append(replace(trial, details=("the file is gone",)))
                    continue
                trials.append(_try_hunk(trial, hunk, file, moved))
                if trials[-1].fit is not Fit.FAILS:
                    moved = trials[-1].found_line - trial.line
    return trials


def _try_hunk(trial: HunkTrial, hunk: Hunk, file: _File, moved: int) -> HunkTrial:
    """Tries one hunk and changes the file where it fits; `moved` lines is how far the one before it was off."""
    expected = file.expected(hunk)
    places = _places(hunk.old, file.lines)
    if not places:
        at = _likeliest(hunk.old, file.lines, expected + moved)
        file.left_out.append((hunk.new_at, len(hunk.new) - len(hunk.old)))
        return replace(trial, details=tuple(_differences(hunk.old, file.lines, at)))
    at = expected if expected in places else min(places, key=lambda place: abs(place - expected - moved))
    file.lines[at : at + len(hunk.old)] = hunk.new
    line = trial.line + at - expected
    if at == expected:
        return replace(trial, fit=Fit.AS_IS, found_line=line)
    if len(places) == 1:
        return replace(trial, fit=Fit.MOVED, found_line=line)
    others = ", ".join(str(place - at + line) for place in places if place != at)
    return replace(trial, fit=Fit.AMBIGUOUS, found_line=line, details=(f"also fits at line {others}",))


def _places(old: tuple[bytes, ...], lines: list[bytes]) -> list[int]:
    return [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == list(old)]


def _likeliest(old: tuple[bytes, ...], lines: list[bytes], expected: int) -> int:
    """Where most lines of the hunk stand; of equal places the one nearest to `expected`."""

    def matching(at: int) -> tuple[int, int]:
        same = sum(line == wanted for line, wanted in zip(lines[at:], old, strict=False))
        return same, -abs(at - expected)

    return max(range(max(1, len(lines))), key=matching)


def _differences(old: tuple[bytes, ...], lines: list[bytes], at: int) -> Iterator[str]:
    shown = 0
    for offset, wanted in enumerate(old):
        found = lines[at + offset] if at + offset < len(lines) else None
        if found == wanted:
            continue
        if shown == SHOWN_DIFFERENCES:
            yield "and further lines"
            return
        shown += 1
        yield f"line {at + offset + 1}: expected {_text(wanted)}, found {_text(found)}"


def _text(line: bytes | None) -> str:
    return "the end of the file" if line is None else repr(line.decode("utf-8", "replace").rstrip("\n"))


def applies(trials: list[HunkTrial]) -> bool:
    """Whether the whole series applies, at whatever lines."""
    return all(trial.fit is not Fit.FAILS for trial in trials)


def report(trials: list[HunkTrial]) -> str:
    """Per patch and hunk, then the counts."""
    out: list[str] = []
    before: tuple[str, ...] = ()
    for trial in trials:
        for depth, heading in enumerate((trial.patch, trial.path)):
            if before[: depth + 1] != (trial.patch, trial.path)[: depth + 1]:
                out.append("  " * depth + heading)
        before = (trial.patch, trial.path)
        moved = f" (now {trial.found_line}, {trial.found_line - trial.line:+d})"
        where = moved if trial.fit in (Fit.MOVED, Fit.AMBIGUOUS) else ""
        out.append(f"    hunk {trial.number}, line {trial.line}{where}: {trial.fit}")
        out += [f"      {detail}" for detail in trial.details]
    counts = {fit: sum(trial.fit is fit for trial in trials) for fit in Fit}
    out.append(", ".join(f"{fit}: {count}" for fit, count in counts.items() if count))
    return "\n".join(out)


def download(version: str, folder: Path) -> Path:
    """The wheel of a release, of the newest one where `version` is empty. Raises PatchingError."""
    wanted = f"vllm=={version}" if version else "vllm"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*pip, "--dest", str(folder), wanted], check=False).returncode:
        raise PatchingError(
            f"pip cannot download a wheel of {wanted} for this platform; name a source tree instead"
        )
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def wheel_reader(wheel: Path) -> ReadFile:
    """Reads files out of a wheel. Raises PatchingError where it is none."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise PatchingError(f"{wheel} is not a wheel: {error}") from error

    def read(path: str) -> bytes | None:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(path) if path in names else None

    return read


def tree_reader(folder: Path) -> ReadFile:
    """Reads files of a source tree or a site-packages folder, upstream's own where eldr has patched them.

    Raises PatchingError where `folder` holds no vLLM.
    """
    root = open_tree(folder).root

    def read(path: str) -> bytes | None:
        places = (root / FOLDER / "upstream" / path, root / path)
        return next((place.read_bytes() for place in places if place.is_file()), None)

    return read


def main(arguments: list[str]) -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.patch_tryout",
        description="Tries eldr's patch series on another vLLM and reports what no longer applies.",
    )
    parser.add_argument("target", nargs="?", default="", help="a version, a wheel or a tree; default: newest")
    target = parser.parse_args(arguments).target
    series = bundled_series()
    with tempfile.TemporaryDirectory(prefix="eldr-tryout-") as folder:
        try:
            if target and Path(target).is_dir():
                name, read = target, tree_reader(Path(target))
            elif target.endswith(".whl"):
                name, read = target, wheel_reader(Path(target))
            else:
                wheel = download(target, Path(folder))
                name, read = wheel.name, wheel_reader(wheel)
            trials = try_series(series, read)
        except PatchingError as error:
            sys.exit(f"patch_tryout: {error}")
    print(f"patches for vLLM {series.upstream.version} on {name}")
    print(report(trials))
    return 0 if applies(trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
