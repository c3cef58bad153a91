"""The inflation writes the padded original, once, and refuses what it cannot do."""

import json
import struct
from pathlib import Path

import inflate as inflation
import numpy as np
import pytest
from inflate import InflationError, inflate, read_entries, read_tensor, verify

TESTBED_MODEL = Path(inflation.__file__).parent / "model"
GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"
DOWN = "model.layers.0.mlp.experts.0.down_proj.weight"
NORM = "model.norm.weight"


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray], dtype: str, width: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"moe_intermediate_size": width}))
    (folder / "tokenizer.json").write_text("{}")
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": tensor.shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    bits = {name: rng.integers(1, 1 << 15, shape, dtype=np.uint16)
            for name, shape in {GATE: (32, 4), DOWN: (4, 32), NORM: (4,)}.items()}  # fmt: skip
    return write_checkpoint(tmp_path / "source", bits, "BF16", 32)


def tensors_of(folder):
    path = folder / "model.safetensors"
    return {entry.name: (entry, read_tensor(path, entry)) for entry in read_entries(path)}


def test_experts_grow_by_zeros_at_the_end_and_nothing_else_changes(source, tmp_path):
    before, after = tensors_of(source), tensors_of(inflate(source, tmp_path / "wide", 96))
    assert after[GATE][1].shape == (96, 4)
    assert after[DOWN][1].shape == (4, 96)
    np.testing.assert_array_equal(after[GATE][1][:32], before[GATE][1])
    np.testing.assert_array_equal(after[DOWN][1][:, :32], before[DOWN][1])
    assert not after[GATE][1][32:].any()
    assert not after[DOWN][1][:, 32:].any()
    np.testing.assert_array_equal(after[NORM][1], before[NORM][1])


def test_config_names_the_new_width_and_other_files_come_along(source, tmp_path):
    target = inflate(source, tmp_path / "wide", 64, "float32")
    assert json.loads((target / "config.json").read_text()) == {
        "moe_intermediate_size": 64,
        "dtype": "float32",
    }
    assert (target / "tokenizer.json").read_text() == "{}"


def test_widening_to_float32_is_exact_and_can_be_narrowed_back(source, tmp_path):
    wide = inflate(source, tmp_path / "wide", 64, "float32")
    back = inflate(wide, tmp_path / "back", 64, "bfloat16")
    np.testing.assert_array_equal(tensors_of(back)[GATE][1][:32], tensors_of(source)[GATE][1])
    as_float = tensors_of(wide)[NORM][1]
    np.testing.assert_array_equal(as_float.view("<u4") >> 16, tensors_of(source)[NORM][1])


def test_a_narrowing_that_loses_bits_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", {NORM: np.array([0.1], np.float32)}, "F32", 32)
    with pytest.raises(InflationError, match="bfloat16"):
        inflate(source, tmp_path / "narrow", 32, "bfloat16")
    assert list(tmp_path.iterdir()) == [source]


def test_a_complete_target_is_kept(source, tmp_path):
    target = inflate(source, tmp_path / "wide", 64)
    written_ns = (target / "model.safetensors").stat().st_mtime_ns
    assert inflate(source, target, 64) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == written_ns


@pytest.mark.parametrize("other", [{"width": 96}, {"width": 64, "dtype": "float32"}])
def test_a_target_of_another_inflation_is_refused(source, tmp_path, other):
    target = inflate(source, tmp_path / "wide", 64)
    with pytest.raises(InflationError, match="exists and holds"):
        inflate(source, target, **other)


def test_a_foreign_folder_is_refused_and_left_alone(source, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(InflationError, match="exists and holds None"):
        inflate(source, foreign, 64)
    assert foreign.is_dir()


@pytest.mark.parametrize("width", [0, 31, 33, 100])
def test_a_width_that_does_not_fit_is_refused_by_value(source, tmp_path, width):
    with pytest.raises(InflationError, match=f"got {width}"):
        inflate(source, tmp_path / "wide", width)


def test_an_unknown_stored_dtype_is_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", {NORM: np.zeros(2, np.float16)}, "F16", 32)
    with pytest.raises(InflationError, match="F16"):
        inflate(source, tmp_path / "wide", 32)


def test_verify_finds_a_weight_that_is_not_the_padded_original(source, tmp_path):
    target = inflate(source, tmp_path / "wide", 64)
    assert verify(source, target) == 3
    weights = target / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(InflationError, match="not the padded original"):
        verify(source, target)


def test_the_testbed_inflates_to_the_padded_original(tmp_path):
    target = inflate(TESTBED_MODEL, tmp_path / "testbed-64", 64)
    assert verify(TESTBED_MODEL, target) == len(read_entries(TESTBED_MODEL / "model.safetensors"))
