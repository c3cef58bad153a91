from pathlib import Path

import pytest
from patch_making import MakeSeries, format_patch, git_diff

from eldr.patching import PatchingError, bundled_series, load_series

A = b"1\n2\n3\n4\n5\n6\n7\n8\n9\n"
A1 = A.replace(b"2\n", b"two\n")
A2 = A1.replace(b"8\n", b"eight\n")


def test_the_shipped_series_is_complete_and_well_formed() -> None:
    series = bundled_series()
    assert (series.upstream.project, series.upstream.version) == ("vllm", "0.32.0")
    names = [patch.name for patch in series.patches]
    assert "0001-scheduler-state-hook.patch" in names
    assert "0002-tolerate-late-transfer-notices.patch" in names
    assert sorted(series.upstream.sha256) == series.paths


def test_the_header_of_each_shipped_patch_says_why_no_seam_does_it_and_when_it_can_go() -> None:
    folder = Path(__file__).parents[2] / "patches" / "vllm-0.32.0"
    for patch in bundled_series().patches:
        header = (folder / patch.name).read_text().split("\ndiff --git")[0].lower()
        assert "seam" in header, patch.name
        assert "can go" in header, patch.name


def test_patches_of_one_file_apply_in_order_and_undo_to_upstream(make_series: MakeSeries) -> None:
    series = make_series({"vllm/a.py": A}, {"vllm/a.py": A1}, {"vllm/a.py": A2})
    assert series.apply("vllm/a.py", A) == A2
    assert series.undo("vllm/a.py", A2) == A
    assert series.undo("vllm/a.py", A1) == A
    assert series.undo("vllm/a.py", A2 + b"10\n") is None
    assert [patch.subject for patch in series.patches] == ["step 1", "step 2"]


def test_a_hunk_that_does_not_fit_is_named_with_its_patch(make_series: MakeSeries) -> None:
    series = make_series({"vllm/a.py": A}, {"vllm/a.py": A1}, {"vllm/a.py": A2})
    with pytest.raises(PatchingError, match=r"^0002-step\.patch: vllm/a\.py: hunk 1 does not fit at line 9"):
        series.apply("vllm/a.py", A.replace(b"9\n", b"nine\n"))


def written(folder: Path, upstream: str, series: str, **patches: bytes) -> Path:
    (folder / "UPSTREAM").write_text(upstream)
    (folder / "series").write_text(series)
    for name, content in patches.items():
        (folder / f"{name}.patch").write_bytes(content)
    return folder


GOOD = format_patch("x", git_diff("vllm/a.py", A, A1))
HASH = f"sha256 {'0' * 64} vllm/a.py"


@pytest.mark.parametrize(
    ("upstream", "series", "message"),
    [
        (f"version 1\n{HASH}", "p.patch", "no line `project VALUE`"),
        (f"project vllm\n{HASH}", "p.patch", "no line `version VALUE`"),
        ("project vllm\nversion 1\nsha256 12 vllm/a.py", "p.patch", "line 3: expected"),
        ("project vllm\nversion 1\nbranch main", "p.patch", "line 3: expected"),
        ("project vllm\nversion 1", "p.patch", r"p\.patch changes vllm/a\.py, which UPSTREAM does not list"),
        (
            f"project vllm\nversion 1\n{HASH}\n{HASH[:-4]}b.py",
            "p.patch",
            r"no patch changes vllm/b\.py",
        ),
        (f"project vllm\nversion 1\n{HASH}", "", r"does not name p\.patch"),
        (f"project vllm\nversion 1\n{HASH}", "p.patch\np.patch", "named once"),
        (f"project vllm\nversion 1\n{HASH}", "../p.patch", "must be a file beside it"),
        (f"project vllm\nversion 1\n{HASH}", "p.patch\nq.patch", r"q\.patch: No such file"),
    ],
)
def test_a_wrong_series_is_refused_by_file_and_line(
    tmp_path: Path, upstream: str, series: str, message: str
) -> None:
    with pytest.raises(PatchingError, match=message):
        load_series(written(tmp_path, upstream, series, p=GOOD))


def test_a_patch_that_git_format_patch_did_not_make_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, f"project vllm\nversion 1\n{HASH}", "p.patch", p=git_diff("vllm/a.py", A, A1))
    with pytest.raises(PatchingError, match="not made by git format-patch"):
        load_series(folder)


def test_a_folded_and_encoded_subject_reads_as_one_line(tmp_path: Path) -> None:
    patch = GOOD.replace(
        b"Subject: [PATCH] x", b"Subject: [PATCH 2/3] a long\n =?UTF-8?q?na=C3=AFve?= subject"
    )
    (read,) = load_series(written(tmp_path, f"project vllm\nversion 1\n{HASH}", "p.patch", p=patch)).patches
    assert read.subject == "a long naïve subject"
