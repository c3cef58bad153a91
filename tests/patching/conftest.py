import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from patch_making import MakeSeries, MakeTree, format_patch, git_diff

from eldr.patching import Series, VllmTree, load_series, open_tree


@pytest.fixture
def make_series(tmp_path: Path) -> MakeSeries:
    """Writes and loads a series: upstream files, then per patch the files it changes with their new content."""

    def made(upstream: Mapping[str, bytes], *steps: Mapping[str, bytes], version: str = "1.2.0") -> Series:
        folder = tmp_path / f"series-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        now = dict(upstream)
        names = []
        for number, step in enumerate(steps, 1):
            diffs = [git_diff(path, now[path], new) for path, new in step.items()]
            names.append(f"{number:04}-step.patch")
            (folder / names[-1]).write_bytes(format_patch(f"step {number}", *diffs))
            now |= step
        touched = {path for step in steps for path in step}
        hashes = [f"sha256 {hashlib.sha256(upstream[path]).hexdigest()} {path}" for path in sorted(touched)]
        (folder / "UPSTREAM").write_text("\n".join(["project vllm", f"version {version}", *hashes]))
        (folder / "series").write_text("# comment\n\n" + "\n".join(names))
        return load_series(folder)

    return made


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Writes a tree with a package `vllm` of some version and these files."""

    def made(files: Mapping[str, bytes], version: str | None = "1.2.0") -> VllmTree:
        root = tmp_path / "tree"
        (root / "vllm").mkdir(parents=True)
        (root / "vllm/__init__.py").write_bytes(b"raise ImportError('must not be imported')\n")
        if version is not None:
            (root / "vllm/_version.py").write_text(f"__version__ = version = {version!r}\n")
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        return open_tree(root)

    return made
