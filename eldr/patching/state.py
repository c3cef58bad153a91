"""Pure: what state a tree is in, and what each of its files becomes."""

from dataclasses import dataclass
from enum import StrEnum

from eldr.patching.errors import PatchingError
from eldr.patching.record import Record
from eldr.patching.series import Series, sha256


class FileState(StrEnum):
    """One file against the series."""

    UPSTREAM = "upstream"
    PATCHED = "patched"
    OUTDATED = "outdated"
    """Holds some patches of this series, or those of another one that eldr applied."""
    FOREIGN = "foreign"
    """Changed by hand or by another tool, or gone."""


class TreeState(StrEnum):
    """All files together."""

    APPLIED = "applied"
    NOT_APPLIED = "not-applied"
    PARTIAL = "partial"
    """Some files upstream or outdated, others patched; both apply and revert know each byte."""
    FOREIGN = "foreign"
    """Some file is foreign: nothing is written."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """`upstream` and `patched` are the contents after revert and apply; a foreign file has neither."""

    path: str
    state: FileState
    upstream: bytes = b""
    patched: bytes = b""
    detail: str = ""


def examine(series: Series, contents: dict[str, bytes | None], record: Record) -> tuple[FileStatus, ...]:
    """Status of the files in `contents` (None: absent), whose keys are the paths of series and record.

    A file that only an older series touched, and that holds none of it, is left out.
    Raises PatchingError naming patch, file and hunk where the series does not fit upstream's own files.
    """
    found = (_examine(series, path, content, record) for path, content in sorted(contents.items()))
    return tuple(status for status in found if status is not None)


def tree_state(files: tuple[FileStatus, ...]) -> TreeState:
    """The state that all files together are in."""
    states = {file.state for file in files}
    if FileState.FOREIGN in states:
        return TreeState.FOREIGN
    if states == {FileState.PATCHED}:
        return TreeState.APPLIED
    if states == {FileState.UPSTREAM}:
        return TreeState.NOT_APPLIED
    return TreeState.PARTIAL


def _examine(series: Series, path: str, content: bytes | None, record: Record) -> FileStatus | None:
    kept = record.files.get(path)
    recorded = kept.upstream if kept and content is not None and sha256(content) in kept.written else None
    if path not in series.upstream.sha256:
        if recorded is None:
            return None
        return FileStatus(path, FileState.OUTDATED, recorded, recorded, "of another series")
    if content is None:
        return FileStatus(path, FileState.FOREIGN, detail="missing")
    upstream = _upstream(series, path, content, recorded)
    if upstream is None:
        return FileStatus(path, FileState.FOREIGN, detail=_difference(series, path, content))
    patched = series.apply(path, upstream)
    if content == patched:
        return FileStatus(path, FileState.PATCHED, upstream, patched)
    if content == upstream:
        return FileStatus(path, FileState.UPSTREAM, upstream, patched)
    return FileStatus(path, FileState.OUTDATED, upstream, patched, "has other patches than this series")


def _upstream(series: Series, path: str, content: bytes, recorded: bytes | None) -> bytes | None:
    expected = series.upstream.sha256[path]
    if sha256(content) == expected:
        return content
    if recorded is not None and sha256(recorded) == expected:
        return recorded
    return series.undo(path, content)


def _difference(series: Series, path: str, content: bytes) -> str:
    try:
        series.apply(path, content)
    except PatchingError as error:
        return f"changed by hand or by another tool; {error}"
    return "changed by hand or by another tool; every hunk fits, but other lines differ from upstream's"
