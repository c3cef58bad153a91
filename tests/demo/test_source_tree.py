"""The testbed is found in the source tree, and its model is widened once."""

import pytest

from eldr.demo.source_tree import SourceTreeError, find_source_tree


def test_the_tree_of_the_working_directory_comes_first(tmp_path, monkeypatch):
    model = tmp_path / "integration/testbed/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_source_tree().model == model


def test_width_zero_serves_the_model_as_trained(tmp_path):
    tree = find_source_tree()
    assert tree.served_model(0, tmp_path) == tree.model


def test_a_width_is_made_once_and_kept(tmp_path):
    tree = find_source_tree()
    served = tree.served_model(64, tmp_path)
    written_ns = (served / "model.safetensors").stat().st_mtime_ns
    assert tree.served_model(64, tmp_path) == served
    assert (served / "model.safetensors").stat().st_mtime_ns == written_ns


def test_a_width_that_does_not_fit_says_why(tmp_path):
    with pytest.raises(SourceTreeError, match="multiple of 32"):
        find_source_tree().served_model(33, tmp_path)
