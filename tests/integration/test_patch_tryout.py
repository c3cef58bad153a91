"""The try-out of the series on another vLLM says of every hunk whether, and where, it applies."""

import zipfile
from pathlib import Path

import pytest

from eldr import patching
from eldr.patching.series import Patch, Upstream
from eldr.patching.unified_diff import parse
from integration import patch_tryout
from integration.patch_tryout import Fit, try_series

FILE = "vllm/f.py"
ROOT = Path(__file__).resolve().parents[2]

# Two patches of one file of 12 lines: a line after `d` and one for `k`, then one after `l`.
FIRST = f"""diff --git a/{FILE} b/{FILE}
--- a/{FILE}
+++ b/{FILE}
@@ -3,3 +3,4 @@
 c
 d
+new
 e
@@ -10,3 +11,3 @@
 j
-k
+K
 l
"""
SECOND = f"""diff --git a/{FILE} b/{FILE}
--- a/{FILE}
+++ b/{FILE}
@@ -12,2 +12,3 @@
 K
 l
+end
"""
UPSTREAM = "abcdefghijkl"


@pytest.fixture
def series() -> patching.Series:
    patches = [Patch(f"{n}.patch", n, parse(text.encode(), n)) for n, text in (("1", FIRST), ("2", SECOND))]
    return patching.Series(Upstream("vllm", "1.0", {FILE: "0" * 64}), tuple(patches))


def tried(series: patching.Series, letters: str) -> list[tuple[Fit, int]]:
    """Fit and line of the three hunks on a file with one letter a line."""
    content = "".join(f"{letter}\n" for letter in letters).encode()
    return [(trial.fit, trial.found_line) for trial in try_series(series, {FILE: content}.get)]


def test_the_release_of_the_series_takes_it_as_it_is(series: patching.Series) -> None:
    assert tried(series, UPSTREAM) == [(Fit.AS_IS, 3), (Fit.AS_IS, 10), (Fit.AS_IS, 12)]


def test_lines_that_upstream_added_before_a_hunk_move_it(series: patching.Series) -> None:
    assert tried(series, "abcdefgxyhijkl") == [(Fit.AS_IS, 3), (Fit.MOVED, 12), (Fit.MOVED, 14)]


def test_a_hunk_that_fails_is_left_out_and_the_others_are_tried(series: patching.Series) -> None:
    assert tried(series, "abcDefghijkl") == [(Fit.FAILS, 0), (Fit.AS_IS, 10), (Fit.AS_IS, 12)]


def test_a_patch_on_top_of_one_that_fails_fails_too(series: patching.Series) -> None:
    assert tried(series, "abcdefghij") == [(Fit.AS_IS, 3), (Fit.FAILS, 0), (Fit.FAILS, 0)]


def test_a_hunk_that_fits_at_several_lines_is_said_and_the_nearest_is_taken(series: patching.Series) -> None:
    content = b"c\nd\ne\n" + b"x\n" * 5 + b"c\nd\ne\n" + b"j\nk\nl\n"
    first = try_series(series, {FILE: content}.get)[0]
    assert (first.fit, first.found_line, first.details) == (Fit.AMBIGUOUS, 1, ("also fits at line 9",))


def test_the_report_names_the_lines_that_differ(series: patching.Series) -> None:
    content = "".join(f"{letter}\n" for letter in "zabcDefghijkl").encode()
    trials = try_series(series, {FILE: content}.get)
    text = patch_tryout.report(trials)
    assert "hunk 1, line 3: no longer applies" in text
    assert "line 5: expected 'd', found 'D'" in text
    assert "hunk 2, line 10 (now 11, +1): applies at another line" in text
    assert text.endswith("applies at another line: 2, no longer applies: 1")
    assert not patch_tryout.applies(trials)


def test_a_file_that_is_gone_fails_every_hunk_of_it(series: patching.Series) -> None:
    trials = try_series(series, {}.get)
    assert [trial.details for trial in trials] == [("the file is gone",)] * 3


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A tree whose patched files are 40 lines longer at the top than the hunks' own lines."""
    series = patching.bundled_series()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    for path in series.paths:
        # Upstream's text is not at hand without vLLM: the old lines of every hunk of the first patch are enough
        # for that patch, and show that what is not there is reported.
        lines = [b"#\n"] * 40
        for diff in series.patches[0].files:
            if diff.path == path:
                lines += [line for hunk in diff.hunks for line in hunk.old]
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"".join(lines))
    return tmp_path


def test_the_exit_code_says_whether_all_apply(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert patch_tryout.main([str(shipped)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"patches for vLLM 0.32.0 on {shipped}")
    assert "applies at another line" in printed
    assert "no longer applies" in printed


def test_a_wheel_is_read_like_a_tree(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in patching.bundled_series().paths:
            archive.write(shipped / path, path)
    patch_tryout.main([str(shipped)])
    from_tree = capsys.readouterr().out.split("\n", 1)[1]
    patch_tryout.main([str(wheel)])
    assert capsys.readouterr().out.split("\n", 1)[1] == from_tree


def test_a_tree_that_eldr_has_patched_is_tried_as_upstream_made_it(shipped: Path) -> None:
    kept = shipped / patching.record.FOLDER / "upstream" / FILE
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"upstream")
    (shipped / FILE).write_bytes(b"patched")
    assert patch_tryout.tree_reader(shipped)(FILE) == b"upstream"


@pytest.mark.parametrize("what", ["empty folder", "no wheel"])
def test_what_is_no_vllm_is_refused_by_name(what: str, tmp_path: Path) -> None:
    target = tmp_path
    if what == "no wheel":
        target = tmp_path / "x.whl"
        target.write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=str(target)):
        patch_tryout.main([str(target)])


def test_the_shipped_series_changes_fewer_than_200_lines() -> None:
    changed = 0
    for path in sorted((ROOT / "patches").rglob("*.patch")):
        body = path.read_text(encoding="utf-8").partition("\ndiff --git ")[2].partition("\n-- \n")[0]
        changed += sum(
            line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))
            for line in body.splitlines()
        )
    assert 0 < changed < 200
