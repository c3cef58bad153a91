"""The shipped series against the files of the installed vLLM."""

import shutil
from pathlib import Path

import pytest

from eldr import patching

pytestmark = pytest.mark.engine


def test_the_shipped_series_applies_to_the_installed_files_and_reverts_to_the_byte(tmp_path: Path) -> None:
    installed, series = patching.find_installed(), patching.bundled_series()
    for path in ["vllm/__init__.py", "vllm/_version.py", *series.paths]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed.root / path, tmp_path / path)
    tree = patching.open_tree(tmp_path)
    upstream = {file.path: file.upstream for file in patching.revert(tree, series).files}
    assert {path: patching.series.sha256((tmp_path / path).read_bytes()) for path in series.paths} == dict(
        series.upstream.sha256
    )
    assert patching.apply(tree, series).state is patching.TreeState.APPLIED
    for path in series.paths:
        compile((tmp_path / path).read_bytes(), path, "exec")
    patching.revert(tree, series)
    assert {path: (tmp_path / path).read_bytes() for path in series.paths} == upstream
    assert not (tmp_path / ".eldr-patches").exists()
