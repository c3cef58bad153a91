import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from patch_making import MakeSeries, MakeTree

from eldr.patching import (
    FileState,
    PatchingError,
    Series,
    TreeState,
    VllmTree,
    apply,
    open_tree,
    revert,
    status,
)

A, B = "vllm/a.py", "vllm/core/b.py"
TEXT = b"".join(b"line %d\n" % number for number in range(1, 21))
UPSTREAM = {A: TEXT, B: TEXT.replace(b"line", b"row")}
PATCHED = {A: TEXT.replace(b"line 3\n", b"three\n"), B: UPSTREAM[B].replace(b"row 9\n", b"")}


@pytest.fixture
def series(make_series: MakeSeries) -> Series:
    return make_series(UPSTREAM, {A: PATCHED[A]}, {B: PATCHED[B]})


@pytest.fixture
def tree(make_tree: MakeTree) -> VllmTree:
    return make_tree(UPSTREAM)


def contents(tree: VllmTree) -> dict[str, bytes]:
    """Every file of the tree, eldr's record included."""
    files = (path for path in tree.root.rglob("*") if path.is_file())
    return {str(path.relative_to(tree.root)): path.read_bytes() for path in files}


def folders(tree: VllmTree) -> set[str]:
    return {str(path.relative_to(tree.root)) for path in tree.root.rglob("*") if path.is_dir()}


def states(tree: VllmTree, series: Series) -> dict[str, FileState]:
    return {file.path: file.state for file in status(tree, series).files}


def put(tree: VllmTree, path: str, content: bytes) -> None:
    (tree.root / path).write_bytes(content)


def test_apply_patches_every_file_and_a_second_apply_changes_nothing(tree: VllmTree, series: Series) -> None:
    assert status(tree, series).state is TreeState.NOT_APPLIED
    report = apply(tree, series)
    assert (report.state, report.changed) == (TreeState.APPLIED, (A, B))
    assert {path: (tree.root / path).read_bytes() for path in (A, B)} == PATCHED
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tree.root.rglob("*")}
    again = apply(tree, series)
    assert (again.state, again.changed) == (TreeState.APPLIED, ())
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in tree.root.rglob("*")} == before


def test_revert_brings_the_tree_back_to_the_byte_and_a_second_one_changes_nothing(
    tree: VllmTree, series: Series
) -> None:
    files, dirs = contents(tree), folders(tree)
    apply(tree, series)
    report = revert(tree, series)
    assert (report.state, report.changed) == (TreeState.NOT_APPLIED, (A, B))
    assert contents(tree) == files
    assert folders(tree) == dirs
    assert revert(tree, series).changed == ()


def test_status_changes_nothing(tree: VllmTree, series: Series) -> None:
    files = contents(tree)
    status(tree, series)
    assert contents(tree) == files


@pytest.mark.parametrize("action", [apply, status, revert])
def test_another_version_is_refused_with_both_named(make_tree: MakeTree, series: Series, action: Any) -> None:
    tree = make_tree(UPSTREAM, version="1.2.1")
    files = contents(tree)
    with pytest.raises(
        PatchingError, match=r"holds vLLM 1\.2\.1; these patches are for 1\.2\.0 and no other"
    ):
        action(tree, series)
    assert contents(tree) == files


@pytest.mark.parametrize("version", ["1.2.0.dev3", "1.2.0rc1", "1.2.0.post1", "1.20"])
def test_a_version_that_only_looks_alike_is_refused(
    make_tree: MakeTree, series: Series, version: str
) -> None:
    with pytest.raises(PatchingError, match="no other"):
        apply(make_tree(UPSTREAM, version=version), series)


def test_a_local_label_is_another_build_of_the_same_version(make_tree: MakeTree, series: Series) -> None:
    assert apply(make_tree(UPSTREAM, version="1.2.0+cu128"), series).state is TreeState.APPLIED


def test_a_source_tree_without_a_version_is_known_by_its_files(make_tree: MakeTree, series: Series) -> None:
    tree = make_tree(UPSTREAM, version=None)
    assert apply(tree, series).state is TreeState.APPLIED
    assert revert(tree, series).state is TreeState.NOT_APPLIED
    put(tree, B, b"of some other version\n")
    with pytest.raises(PatchingError, match=B):
        apply(tree, series)


def test_a_file_edited_by_hand_is_refused_with_patch_file_and_hunk(tree: VllmTree, series: Series) -> None:
    put(tree, B, UPSTREAM[B].replace(b"row 10\n", b"row ten\n"))
    files = contents(tree)
    for action in (apply, revert):
        with pytest.raises(PatchingError, match=rf"0002-step\.patch: {B}: hunk 1 does not fit at line 10"):
            action(tree, series)
        assert contents(tree) == files
    report = status(tree, series)
    assert report.state is TreeState.FOREIGN
    assert states(tree, series) == {A: FileState.UPSTREAM, B: FileState.FOREIGN}


def test_an_edit_away_from_every_hunk_is_refused_too(tree: VllmTree, series: Series) -> None:
    put(tree, A, UPSTREAM[A] + b"line 21\n")
    with pytest.raises(PatchingError, match="every hunk fits, but other lines differ from upstream's"):
        apply(tree, series)


def test_an_edit_of_a_patched_file_is_kept_and_refused(tree: VllmTree, series: Series) -> None:
    apply(tree, series)
    put(tree, A, PATCHED[A] + b"mine\n")
    files = contents(tree)
    for action in (apply, revert):
        with pytest.raises(PatchingError, match=rf"{A}: (?s:changed by hand.*)reinstall vLLM 1\.2\.0"):
            action(tree, series)
    assert contents(tree) == files


def test_a_missing_file_is_refused(tree: VllmTree, series: Series) -> None:
    (tree.root / B).unlink()
    with pytest.raises(PatchingError, match=f"{B}: missing"):
        apply(tree, series)


@pytest.mark.parametrize("patched", [A, B])
def test_a_half_applied_tree_is_told_and_can_be_completed_or_undone(
    tree: VllmTree, series: Series, patched: str
) -> None:
    files = contents(tree)
    put(tree, patched, PATCHED[patched])
    assert status(tree, series).state is TreeState.PARTIAL
    apply(tree, series)
    assert status(tree, series).state is TreeState.APPLIED
    revert(tree, series)
    put(tree, patched, PATCHED[patched])
    revert(tree, series)
    assert contents(tree) == files


def test_a_tree_that_git_patched_counts_as_applied_and_reverts(tree: VllmTree, series: Series) -> None:
    for path, content in PATCHED.items():
        put(tree, path, content)
    assert status(tree, series).state is TreeState.APPLIED
    assert apply(tree, series).changed == ()
    assert revert(tree, series).changed == (A, B)
    assert {path: (tree.root / path).read_bytes() for path in (A, B)} == UPSTREAM


def test_the_first_of_two_patches_of_one_file_is_told_as_outdated(
    make_series: MakeSeries, tree: VllmTree
) -> None:
    second = PATCHED[A].replace(b"line 15\n", b"fifteen\n")
    series = make_series(UPSTREAM, {A: PATCHED[A]}, {A: second})
    put(tree, A, PATCHED[A])
    assert states(tree, series) == {A: FileState.OUTDATED}
    apply(tree, series)
    assert (tree.root / A).read_bytes() == second


def test_a_newer_series_replaces_the_one_that_is_applied(
    make_series: MakeSeries, tree: VllmTree, series: Series
) -> None:
    files = contents(tree)
    apply(tree, series)
    other = UPSTREAM[A].replace(b"line 3\n", b"THREE\n").replace(b"line 12\n", b"")
    newer = make_series(UPSTREAM, {A: other})
    assert states(tree, newer) == {A: FileState.OUTDATED, B: FileState.OUTDATED}
    report = apply(tree, newer)
    assert (report.state, report.changed) == (TreeState.APPLIED, (A, B))
    # B is no longer patched by anybody.
    assert ((tree.root / A).read_bytes(), (tree.root / B).read_bytes()) == (other, UPSTREAM[B])
    # And back again: what the older series wrote is still known.
    assert apply(tree, series).changed == (A, B)
    revert(tree, newer)
    assert contents(tree) == files


def test_a_reinstalled_vllm_is_upstream_whatever_the_record_says(tree: VllmTree, series: Series) -> None:
    apply(tree, series)
    for path, content in UPSTREAM.items():
        put(tree, path, content)
    assert status(tree, series).state is TreeState.NOT_APPLIED
    assert apply(tree, series).state is TreeState.APPLIED


def test_the_record_of_another_vllm_version_does_not_count(
    make_series: MakeSeries, tree: VllmTree, series: Series
) -> None:
    apply(tree, series)
    later = {A: TEXT.replace(b"line 1\n", b"line 0\nline 1\n"), B: b"rewritten\n"}
    for path, content in later.items():
        put(tree, path, content)
    put(tree, "vllm/_version.py", b"__version__ = '1.3.0'\n")
    upgraded = open_tree(tree.root)
    newer = make_series(later, {A: later[A].replace(b"line 9\n", b"nine\n")}, version="1.3.0")
    assert status(upgraded, newer).state is TreeState.NOT_APPLIED
    assert apply(upgraded, newer).state is TreeState.APPLIED
    revert(upgraded, newer)
    assert (tree.root / A).read_bytes() == later[A]
    assert not (tree.root / ".eldr-patches").exists()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"format": 99}', b'{"format": 1, "version": "1.2.0"}'])
def test_a_damaged_record_is_refused_with_what_to_do(tree: VllmTree, series: Series, damage: bytes) -> None:
    apply(tree, series)
    put(tree, ".eldr-patches/record.json", damage)
    with pytest.raises(
        PatchingError, match=r"\.eldr-patches is damaged or of another eldr .*remove that folder"
    ):
        revert(tree, series)
    # Without it, this series itself still knows the way back.
    shutil.rmtree(tree.root / ".eldr-patches")
    assert revert(tree, series).state is TreeState.NOT_APPLIED


def fail_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The nth file to be replaced fails as on a full disk; the others, and what follows, succeed."""
    real, calls = os.replace, iter(range(1, 1000))

    def replace(source: str, target: Path) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


# Two kept files, the record, two patched files.
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_write_that_fails_leaves_the_tree_as_it_was(
    tree: VllmTree, series: Series, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    files, dirs = contents(tree), folders(tree)
    fail_at(monkeypatch, nth)
    with pytest.raises(PatchingError, match=r"No space left on device.*the tree is as it was"):
        apply(tree, series)
    assert contents(tree) == files
    assert folders(tree) == dirs
    assert apply(tree, series).state is TreeState.APPLIED


def test_a_revert_that_fails_leaves_the_tree_patched(
    tree: VllmTree, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(tree, series)
    files = contents(tree)
    fail_at(monkeypatch, 2)
    with pytest.raises(PatchingError, match="the tree is as it was"):
        revert(tree, series)
    assert contents(tree) == files


def test_an_interrupt_between_two_files_restores_the_first(
    tree: VllmTree, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = contents(tree)
    real = os.replace

    def replace(source: str, target: Path) -> None:
        if Path(target).name == "b.py" and ".eldr-patches" not in str(target):
            monkeypatch.setattr(os, "replace", real)
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        apply(tree, series)
    assert contents(tree) == files


def test_a_file_that_cannot_be_restored_is_named(
    tree: VllmTree, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    broken = False

    def replace(source: str, target: Path) -> None:
        nonlocal broken
        broken = broken or Path(target) == tree.root / B
        if broken:
            raise OSError(errno.EROFS, "Read-only file system")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(PatchingError, match=rf"could not restore {A} .*: reinstall vLLM"):
        apply(tree, series)
    monkeypatch.setattr(os, "replace", real)
    assert states(tree, series) == {A: FileState.PATCHED, B: FileState.UPSTREAM}
    assert apply(tree, series).state is TreeState.APPLIED


def test_modes_stay_and_a_hard_linked_package_cache_is_not_written_through(
    tree: VllmTree, series: Series, tmp_path: Path
) -> None:
    (tree.root / A).chmod(0o640)
    os.link(tree.root / A, tmp_path / "cache.py")
    apply(tree, series)
    assert (tmp_path / "cache.py").read_bytes() == UPSTREAM[A]
    assert stat.S_IMODE((tree.root / A).stat().st_mode) == 0o640
    revert(tree, series)
    assert stat.S_IMODE((tree.root / A).stat().st_mode) == 0o640


def test_a_series_that_does_not_fit_upstream_writes_nothing(
    make_series: MakeSeries, tree: VllmTree, series: Series
) -> None:
    one = series.patches[0]
    broken = Series(series.upstream, (one, one))
    files = contents(tree)
    with pytest.raises(PatchingError, match=rf"0001-step\.patch: {A}: hunk 1 does not fit at line 3"):
        apply(tree, broken)
    assert contents(tree) == files
