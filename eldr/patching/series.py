"""A patch series on disk: `UPSTREAM`, `series` and the patch files it names."""

import hashlib
import re
from dataclasses import dataclass
from email.header import decode_header, make_header
from email.parser import BytesHeaderParser
from pathlib import Path

from eldr.patching.errors import PatchingError
from eldr.patching.unified_diff import FileDiff, parse

_KEYS = ("project", "version", "tag", "commit")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Upstream:
    """The release that a series is made for, and the sha256 of each file it touches, by path."""

    project: str
    version: str
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class Patch:
    """One topic: file name, subject line, and the files it changes."""

    name: str
    subject: str
    files: tuple[FileDiff, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Patches in the order in which they apply."""

    upstream: Upstream
    patches: tuple[Patch, ...]

    @property
    def paths(self) -> list[str]:
        """Every file that some patch changes, sorted."""
        return sorted({diff.path for patch in self.patches for diff in patch.files})

    def apply(self, path: str, content: bytes) -> bytes:
        """`content` of `path` with all patches. Raises PatchingError naming patch, file and hunk."""
        for name, diff in self._diffs(path):
            try:
                content = diff.apply(content)
            except PatchingError as error:
                raise PatchingError(f"{name}: {error}") from error
        return content

    def undo(self, path: str, content: bytes) -> bytes | None:
        """The upstream content of `path`, where `content` is that plus all or the first few patches."""
        diffs = [diff for _, diff in self._diffs(path)]
        for count in range(len(diffs), 0, -1):
            undone = content
            try:
                for diff in reversed(diffs[:count]):
                    undone = diff.reversed().apply(undone)
            except PatchingError:
                # Not these patches; perhaps fewer of them.
                continue
            if sha256(undone) == self.upstream.sha256[path]:
                return undone
        return None

    def _diffs(self, path: str) -> list[tuple[str, FileDiff]]:
        return [(patch.name, diff) for patch in self.patches for diff in patch.files if diff.path == path]


def sha256(content: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(content).hexdigest()


def bundled_series() -> Series:
    """The series that this eldr ships, from a wheel, an editable install or a checkout alike."""
    return load_series(Path(__file__).parents[1] / "_patches" / "vllm-0.32.0")


def load_series(folder: Path) -> Series:
    """Reads and checks a series. Raises PatchingError naming the file and line that is wrong."""
    upstream = _upstream(folder / "UPSTREAM")
    names = [text for _, text in _entries(folder / "series")]
    for name in names:
        if "/" in name or names.count(name) > 1:
            raise PatchingError(f"{folder / 'series'}: {name} must be a file beside it, named once")
    present = {path.name for path in folder.glob("*.patch")}
    if unnamed := sorted(present - set(names)):
        raise PatchingError(f"{folder / 'series'}: does not name {', '.join(unnamed)}")
    series = Series(upstream, tuple(_patch(folder / name) for name in names))
    for patch in series.patches:
        for diff in patch.files:
            if diff.path not in upstream.sha256:
                raise PatchingError(f"{patch.name} changes {diff.path}, which UPSTREAM does not list")
    if untouched := sorted(set(upstream.sha256) - set(series.paths)):
        raise PatchingError(f"{folder / 'UPSTREAM'}: no patch changes {', '.join(untouched)}")
    return series


def _upstream(path: Path) -> Upstream:
    values: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for number, text in _entries(path):
        key, *rest = text.split()
        if key == "sha256" and len(rest) == 2 and _SHA256.fullmatch(rest[0]):
            hashes[rest[1]] = rest[0]
        elif key in _KEYS and len(rest) == 1:
            values[key] = rest[0]
        else:
            raise PatchingError(
                f"{path}, line {number}: expected `{'|'.join(_KEYS)} VALUE` or `sha256 HEX PATH`"
            )
    for key in ("project", "version"):
        if key not in values:
            raise PatchingError(f"{path}: no line `{key} VALUE`")
    return Upstream(values["project"], values["version"], hashes)


def _patch(path: Path) -> Patch:
    content = _read(path)
    subject = BytesHeaderParser().parsebytes(content.partition(b"\n")[2])["Subject"]
    if not content.startswith(b"From ") or subject is None:
        raise PatchingError(f"{path.name}: not made by git format-patch (no From line or no Subject)")
    plain = " ".join(str(make_header(decode_header(subject))).split())
    return Patch(path.name, re.sub(r"^\[PATCH[^]]*\] ", "", plain), parse(content, path.name))


def _entries(path: Path) -> list[tuple[int, str]]:
    lines = _read(path).decode().splitlines()
    plain = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return [(number, text) for number, text in plain if text]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchingError(f"{path}: {error.strerror}") from error
