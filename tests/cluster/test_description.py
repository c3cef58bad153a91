"""A cluster file: what it gives, and how a wrong one is refused."""

from pathlib import Path

import pytest

from eldr.cluster import ConfigError
from eldr.cluster.description import load_description


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_file_and_names_of_models_stay(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    found = load_description(written(tmp_path, "model: weights\nwork_dir: run"))
    assert found.fleet.engine.model == str(tmp_path / "weights")
    assert found.work_dir == tmp_path / "run"
    assert load_description(written(tmp_path, "model: org/name")).fleet.engine.model == "org/name"


def test_every_part_reaches_its_process(tmp_path: Path) -> None:
    text = """
        model: m
        prefill: 2
        decode: 3
        engine: {max_num_seqs: 8}
        prefill_args: [--a]
        router: {port: 7700, args: [--policy=jsq]}
        gateway: {port: 8000, args: [--grace=1]}
    """
    found = load_description(written(tmp_path, text))
    fleet = found.fleet
    assert (fleet.prefill, fleet.decode, fleet.engine.max_num_seqs, fleet.prefill_args) == (2, 3, 8, ("--a",))
    assert (fleet.router_port, fleet.gateway_port) == (7700, 8000)
    assert (found.router_args, found.gateway_args) == (("--policy=jsq",), ("--grace=1",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file must be a mapping"),
        ("model: [", "expected"),
        ("prefill: 1", "model must be"),
        ("model: m\ndecoder: 1", "unknown key 'decoder'; did you mean 'decode'"),
        ("model: m\nengine: {max_seqs: 1}", "engine has an unknown key 'max_seqs'"),
        ("model: m\ndecode: 0", "decode must be at least 1"),
        ("model: m\ngateway: {port: 70000}", "gateway_port must be"),
        ("model: m\nrouter: {args: --policy}", "router.args must be a list of strings"),
        ("model: m\ndecode: many", "'<' not supported"),
    ],
)
def test_what_is_wrong_is_named_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.yaml") as refused:
        load_description(written(tmp_path, text))
    assert said in str(refused.value)
