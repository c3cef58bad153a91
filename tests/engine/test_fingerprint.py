"""The identity of a model."""

from pathlib import Path

from eldr.engine.fingerprint import SAMPLE_BYTES, model_fingerprint

CONFIG = {"model_type": "qwen3_moe", "num_experts": 64, "_name_or_path": "/a", "dtype": "float32"}


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_the_same_model_in_two_folders_is_the_same(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1024
    a, b = weights(tmp_path / "a", content), weights(tmp_path / "b", content)
    other_path = {**CONFIG, "_name_or_path": "/b", "dtype": "bfloat16", "transformers_version": "9"}
    assert model_fingerprint(CONFIG, a) == model_fingerprint(other_path, b)


def test_other_weights_of_the_same_shape_differ(tmp_path: Path) -> None:
    content = bytearray(8 * SAMPLE_BYTES)
    a = weights(tmp_path / "a", bytes(content))
    content[len(content) // 2] = 1
    b = weights(tmp_path / "b", bytes(content))
    assert model_fingerprint(CONFIG, a) != model_fingerprint(CONFIG, b)


def test_another_configuration_differs(tmp_path: Path) -> None:
    a = weights(tmp_path / "a", b"x")
    assert model_fingerprint(CONFIG, a) != model_fingerprint({**CONFIG, "num_experts": 32}, a)


def test_a_hub_name_counts_with_its_revision() -> None:
    one = model_fingerprint(CONFIG, "org/model", "r1")
    assert one == model_fingerprint(CONFIG, "org/model", "r1") != model_fingerprint(CONFIG, "org/model", "r2")
