"""Strict unified diffs: each line matches at exactly the line number that the hunk names, or nothing applies.

Only what `git diff` writes for changed text files; created, deleted, renamed and binary files are refused.
"""

import io
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from eldr.patching.errors import PatchingError

_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(?: .*)?$")
_FILE = re.compile(rb"^diff --git a/(\S+) b/(\S+)$")
_REFUSED = {
    b"new file mode": "creates a file",
    b"deleted file mode": "deletes a file",
    b"old mode": "changes a file's mode",
    b"rename from": "renames a file",
    b"copy from": "copies a file",
    b"GIT binary patch": "changes a binary file",
    b"Binary files": "changes a binary file",
}


class HunkError(PatchingError):
    """A hunk does not fit the content it was applied to."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines (with their endings) at one place: `old` before, `new` after; positions count from 0."""

    old_at: int
    new_at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    def reversed(self) -> "Hunk":
        """The hunk that undoes this one."""
        return Hunk(self.new_at, self.old_at, self.new, self.old)


@dataclass(frozen=True, slots=True)
class FileDiff:
    """All hunks of one file, in ascending order. `path` is relative to the tree, with forward slashes."""

    path: str
    hunks: tuple[Hunk, ...]

    def reversed(self) -> "FileDiff":
        """The diff that undoes this one."""
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, content: bytes) -> bytes:
        """The changed content. Raises HunkError with hunk, line and both texts where a line differs."""
        lines = _lines(content)
        result: list[bytes] = []
        done = 0
        for number, hunk in enumerate(self.hunks, 1):
            for offset, expected in enumerate(hunk.old):
                at = hunk.old_at + offset
                found = lines[at] if at < len(lines) else None
                if found != expected:
                    raise HunkError(
                        f"{self.path}: hunk {number} does not fit at line {at + 1}: "
                        f"expected {_shown(expected)}, found {_shown(found)}"
                    )
            if hunk.old_at > len(lines):
                raise HunkError(f"{self.path}: hunk {number} lies beyond the file's {len(lines)} lines")
            result += lines[done : hunk.old_at]
            result += hunk.new
            done = hunk.old_at + len(hunk.old)
        return b"".join(result + lines[done:])


def parse(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Diffs of all files in one patch file; what stands before the first `diff --git` is its header.

    Raises PatchingError naming `name` and the line of the patch file.
    """
    return _Parser(text, name).parse()


class _Parser:
    def __init__(self, text: bytes, name: str) -> None:
        self.lines = _lines(text)
        self.name = name
        self.at = 0

    def parse(self) -> tuple[FileDiff, ...]:
        while self.at < len(self.lines) and not self._peek().startswith(b"diff --git "):
            self.at += 1
        diffs: list[FileDiff] = []
        while self._peek().startswith(b"diff --git "):
            diffs.append(self._file())
            if diffs[-1].path in [diff.path for diff in diffs[:-1]]:
                raise self._error(f"{diffs[-1].path} appears twice")
        if not diffs:
            raise self._error("no `diff --git` line: not a patch made by git format-patch")
        # git's signature: "-- " and its version.
        if self._peek() == b"-- ":
            self.at += 2
        while self.at < len(self.lines):
            if self._peek():
                raise self._error(f"unexpected {_shown(self._peek())}")
            self.at += 1
        return tuple(diffs)

    def _file(self) -> FileDiff:
        match = _FILE.match(self._peek())
        if match is None or match[1] != match[2]:
            raise self._error("not `diff --git a/PATH b/PATH` with one path of plain characters")
        path = match[1].decode("utf-8", "replace")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise self._error(f"{path} leads out of the tree")
        self.at += 1
        while not self._peek().startswith(b"--- "):
            for prefix, what in _REFUSED.items():
                if self._peek().startswith(prefix):
                    raise self._error(f"{what} ({path}); eldr's patches only change text files")
            if not self._peek().startswith(b"index "):
                raise self._error(f"expected `--- a/{path}`, found {_shown(self._peek())}")
            self.at += 1
        for expected in (f"--- a/{path}".encode(), f"+++ b/{path}".encode()):
            if self._peek() != expected:
                raise self._error(f"expected {_shown(expected)}, found {_shown(self._peek())}")
            self.at += 1
        hunks: list[Hunk] = []
        while self._peek().startswith(b"@@"):
            hunks.append(self._hunk(hunks[-1] if hunks else None))
        if not hunks:
            raise self._error(f"no hunk for {path}")
        return FileDiff(path, tuple(hunks))

    def _hunk(self, previous: Hunk | None) -> Hunk:
        match = _HUNK.match(self._peek())
        if match is None:
            raise self._error(f"malformed hunk header {_shown(self._peek())}")
        old_start, old_count = int(match[1]), int(match[2] or 1)
        new_start, new_count = int(match[3]), int(match[4] or 1)
        # An empty side names the line before it, any other its first line.
        old_at = old_start - 1 if old_count else old_start
        new_at = new_start - 1 if new_count else new_start
        old_end = previous.old_at + len(previous.old) if previous else 0
        new_end = previous.new_at + len(previous.new) if previous else 0
        if old_at < old_end or new_at - new_end != old_at - old_end:
            raise self._error("line numbers disagree with the hunks before it")
        self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_count or len(new) < new_count:
            kind, line = self._body_line()
            if kind in b" -":
                old.append(line)
            if kind in b" +":
                new.append(line)
        if (len(old), len(new)) != (old_count, new_count):
            raise self._error("more lines than its header says")
        if old == new:
            raise self._error("a hunk that changes nothing")
        return Hunk(old_at, new_at, tuple(old), tuple(new))

    def _body_line(self) -> tuple[bytes, bytes]:
        raw = self.lines[self.at] if self.at < len(self.lines) else b""
        if raw[:1] not in (b" ", b"-", b"+"):
            raise self._error(f"fewer lines than the hunk's header says, found {_shown(raw)}")
        self.at += 1
        line = raw[1:]
        if self._peek().startswith(b"\\ No newline"):
            line = line.removesuffix(b"\n")
            self.at += 1
        return raw[:1], line

    def _peek(self) -> bytes:
        return self.lines[self.at].removesuffix(b"\n") if self.at < len(self.lines) else b""

    def _error(self, what: str) -> PatchingError:
        return PatchingError(f"{self.name}, line {min(self.at, len(self.lines)) + 1}: {what}")


def _lines(content: bytes) -> list[bytes]:
    return io.BytesIO(content).readlines()


def _shown(line: bytes | None) -> str:
    if line is None:
        return "the end of the file"
    return repr(line.decode("utf-8", "replace").removesuffix("\n"))
