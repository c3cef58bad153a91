import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from eldr import patching
from eldr.cli.main import cli

PATH = "vllm/a.py"
UPSTREAM = b"one\ntwo\nthree\n"
PATCH = b"""From 0 Mon Sep 17 00:00:00 2001
From: A <a@b>
Subject: [PATCH] Say 2

---
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
--
2.39.5
""".replace(b"\n--\n", b"\n-- \n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree, and a series of one patch instead of the shipped one."""
    folder, root = tmp_path / "series", tmp_path / "tree"
    folder.mkdir()
    (root / "vllm").mkdir(parents=True)
    (root / "vllm/__init__.py").touch()
    (root / "vllm/_version.py").write_text("__version__ = '0.32.0'")
    (root / PATH).write_bytes(UPSTREAM)
    (folder / "UPSTREAM").write_text(
        f"project vllm\nversion 0.32.0\nsha256 {patching.series.sha256(UPSTREAM)} {PATH}"
    )
    (folder / "series").write_text("0001-say-2.patch")
    (folder / "0001-say-2.patch").write_bytes(PATCH)
    series = patching.load_series(folder)
    monkeypatch.setattr(patching, "bundled_series", lambda: series)
    return root


def eldr(*words: object, **options: Any) -> Result:
    return CliRunner().invoke(cli, ["patch", *map(str, words)], **options)


def test_apply_then_status_then_revert(tree: Path) -> None:
    assert eldr("status", "--tree", tree).exit_code == 1
    result = eldr("apply", "--tree", tree)
    assert result.exit_code == 0
    assert "0001-say-2.patch: Say 2" in result.stdout
    assert f"changed: {PATH}" in result.stdout
    assert "already applied" in eldr("apply", "--tree", tree).stdout
    result = eldr("status", "--tree", tree)
    assert result.exit_code == 0
    assert "every patch is applied" in result.stdout
    assert eldr("revert", "--tree", tree).exit_code == 0
    assert (tree / PATH).read_bytes() == UPSTREAM


def test_json_is_one_object_with_state_files_and_changes(tree: Path) -> None:
    result = eldr("apply", "--tree", tree, "--json")
    assert json.loads(result.output) == {
        "action": "apply",
        "tree": str(tree),
        "vllm_version": "0.32.0",
        "patches_for": "0.32.0",
        "state": "applied",
        "patches": [{"name": "0001-say-2.patch", "subject": "Say 2"}],
        "files": {PATH: {"state": "patched", "detail": ""}},
        "changed": [PATH],
    }
    assert json.loads(eldr("status", "--tree", tree, "--json").output)["changed"] == []


def test_the_tree_can_be_named_by_variable_and_by_file(tree: Path, tmp_path: Path) -> None:
    assert eldr("apply", env={"ELDR_PATCH_TREE": str(tree)}).exit_code == 0
    config = tmp_path / "eldr.yaml"
    config.write_text(f"patch:\n  tree: {tree}\n")
    result = CliRunner().invoke(cli, ["--config", str(config), "patch", "status"])
    assert result.exit_code == 0, result.output


def test_a_foreign_tree_is_told_with_file_and_what_to_do(tree: Path) -> None:
    (tree / PATH).write_bytes(UPSTREAM.replace(b"one", b"ONE"))
    result = eldr("status", "--tree", tree)
    assert result.exit_code == 1
    assert f"foreign   {PATH}: changed by hand or by another tool; 0001-say-2.patch" in result.stdout
    assert "reinstall vLLM" in result.stdout
    result = eldr("apply", "--tree", tree)
    assert result.exit_code == 1
    assert "hunk 1 does not fit at line 1: expected 'one', found 'ONE'" in result.stderr
    assert "Traceback" not in result.output


def test_another_version_is_refused_with_both_versions(tree: Path) -> None:
    (tree / "vllm/_version.py").write_text("__version__ = '0.31.0'")
    result = eldr("apply", "--tree", tree)
    assert result.exit_code == 1
    assert "holds vLLM 0.31.0; these patches are for 0.32.0" in result.stderr


def test_an_unknown_action_is_a_usage_error(tree: Path) -> None:
    result = eldr("aply", "--tree", tree)
    assert result.exit_code == 2
    assert "'apply', 'status', 'revert'" in result.stderr


def test_the_shipped_series_is_found_from_any_folder(tmp_path: Path) -> None:
    """From a wheel, an editable install and a checkout: the series is loaded before a tree is looked at."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "vllm/_version.py").write_text("__version__ = '0.1'")
    result = subprocess.run(
        [sys.executable, "-m", "eldr.cli.main", "patch", "apply", "--tree", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(patching.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "holds vLLM 0.1; these patches are for 0.32.0 and no other" in result.stderr
