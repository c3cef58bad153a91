from difflib import unified_diff

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.patching import PatchingError
from eldr.patching.unified_diff import HunkError, parse

OLD = b"".join(b"line %d\n" % number for number in range(1, 31))
NEW = OLD.replace(b"line 5\n", b"five\n").replace(b"line 20\n", b"").replace(b"line 28\n", b"line 28\nmore\n")


def diff_of(old: bytes, new: bytes, context: int = 3) -> bytes:
    lines = unified_diff(
        [line.decode("latin-1") for line in old.splitlines(keepends=True)],
        [line.decode("latin-1") for line in new.splitlines(keepends=True)],
        "a/f.py",
        "b/f.py",
        n=context,
    )
    body = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return b"diff --git a/f.py b/f.py\nindex 1..2 100644\n" + body.encode("latin-1")


def applied(old: bytes, patch: bytes) -> bytes:
    (diff,) = parse(patch, "p")
    return diff.apply(old)


def test_a_diff_with_three_hunks_applies_and_its_reverse_undoes_it() -> None:
    (diff,) = parse(diff_of(OLD, NEW), "p")
    assert len(diff.hunks) == 3
    assert diff.apply(OLD) == NEW
    assert diff.reversed().apply(NEW) == OLD


LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"-- ", b"--- a/f.py", b"@@ -1 +1 @@", b" c"]), max_size=25
)


@given(LINES, LINES, st.booleans(), st.booleans(), st.integers(0, 3))
def test_any_diff_gives_exactly_the_new_content_and_back(
    old_lines: list[bytes], new_lines: list[bytes], old_ends: bool, new_ends: bool, context: int
) -> None:
    old = b"\n".join(old_lines) + (b"\n" if old_ends and old_lines else b"")
    new = b"\n".join(new_lines) + (b"\n" if new_ends and new_lines else b"")
    if old == new:
        return
    (diff,) = parse(diff_of(old, new, context), "p")
    assert diff.apply(old) == new
    assert diff.reversed().apply(new) == old


def test_carriage_returns_are_part_of_the_line() -> None:
    patch = diff_of(b"one\ntwo\n", b"one\n2\n").replace(b"-two\n", b"-two\r\n")
    assert applied(b"one\ntwo\r\n", patch) == b"one\n2\n"
    with pytest.raises(HunkError, match="two"):
        applied(b"one\ntwo\n", patch)


def test_a_missing_newline_at_the_end_is_kept_added_and_removed() -> None:
    assert applied(b"a\nb", diff_of(b"a\nb", b"a\nc")) == b"a\nc"
    assert applied(b"a\nb", diff_of(b"a\nb", b"a\nb\n")) == b"a\nb\n"
    assert applied(b"a\nb\n", diff_of(b"a\nb\n", b"a\nb")) == b"a\nb"
    with pytest.raises(HunkError):
        applied(b"a\nb\n", diff_of(b"a\nb", b"a\nc"))


def test_a_hunk_that_would_fit_one_line_further_down_is_refused() -> None:
    with pytest.raises(
        HunkError, match=r"f\.py: hunk 1 does not fit at line 2: expected 'line 2', found 'line 1'"
    ):
        applied(b"new first line\n" + OLD, diff_of(OLD, NEW))


def test_a_changed_context_line_is_refused_with_hunk_and_line() -> None:
    content = OLD.replace(b"line 18\n", b"LINE 18\n")
    with pytest.raises(
        HunkError, match="hunk 2 does not fit at line 18: expected 'line 18', found 'LINE 18'"
    ):
        applied(content, diff_of(OLD, NEW))


def test_a_file_that_ends_before_the_hunk_is_refused() -> None:
    with pytest.raises(HunkError, match="hunk 3 does not fit at line 26: expected 'line 26', found the end"):
        applied(b"".join(OLD.splitlines(keepends=True)[:25]), diff_of(OLD, NEW))
    insertion = b"diff --git a/f.py b/f.py\n--- a/f.py\n+++ b/f.py\n@@ -9,0 +10 @@\n+x\n"
    with pytest.raises(HunkError, match="beyond the file's 2 lines"):
        applied(b"1\n2\n", insertion)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b"new file mode 100644", "creates a file"),
        (b"deleted file mode 100644", "deletes a file"),
        (b"old mode 100644", "changes a file's mode"),
        (b"rename from f.py", "renames a file"),
        (b"GIT binary patch", "binary"),
        (b"Binary files a/f.py and b/f.py differ", "binary"),
        (b"similarity index 90%", "expected `--- a/f.py`"),
    ],
)
def test_what_is_no_change_of_a_text_file_is_refused_by_name(header: bytes, what: str) -> None:
    patch = (
        b"Subject: x\n\ndiff --git a/f.py b/f.py\n" + header + b"\n" + diff_of(OLD, NEW).split(b"\n", 1)[1]
    )
    with pytest.raises(PatchingError, match=rf"^0001-x\.patch, line 4: .*{what}"):
        parse(patch, "0001-x.patch")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda p: p.replace(b"diff --git", b"diff"), "not a patch made by git format-patch"),
        (lambda p: p.replace(b"b/f.py", b"b/g.py"), "one path"),
        (
            lambda p: p.replace(b"a/f.py", b"a/../f.py").replace(b"b/f.py", b"b/../f.py"),
            "leads out of the tree",
        ),
        (lambda p: p.replace(b"--- a/f.py", b"--- a/g.py"), "expected '--- a/f.py', found '--- a/g.py'"),
        (lambda p: p.replace(b"+five\n", b""), "fewer lines"),
        (lambda p: p.replace(b"+five\n", b"+five\n+six\n"), "more lines than its header says"),
        (lambda p: p.replace(b"+five\n", b"five\n"), "fewer lines than the hunk's header says, found 'five'"),
        (lambda p: p.replace(b"@@ -2,7 +2,7 @@", b"@@ -2,7 +3,7 @@"), "line numbers disagree"),
        (lambda p: p.replace(b"@@ -2,7 +2,7 @@", b"@@ two @@"), "malformed hunk header"),
        (lambda p: p.split(b"@@")[0], "no hunk for f.py"),
        (lambda p: p + b"something else\n", "unexpected 'something else'"),
        (lambda p: p + p, "appears twice"),
    ],
)
def test_a_malformed_patch_is_refused(change, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PatchingError, match=what):
        parse(change(diff_of(OLD, NEW)), "p")


def test_a_hunk_that_changes_nothing_is_refused() -> None:
    with pytest.raises(PatchingError, match="changes nothing"):
        parse(b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n same\n", "p")
