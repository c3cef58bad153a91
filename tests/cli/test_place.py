"""`eldr place`: counts in, a valid map and a table out."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from eldr.cli.place import command
from eldr.placement import Geometry


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    ids = rng.random((12, 10, 2, 8)).argsort(axis=3)[..., :2].astype(np.uint8)
    prefill = np.zeros((12, 2, 8), np.int64)
    prefill[:, :, :2] = 3
    path = tmp_path / "counts.npz"
    np.savez(path, prefill_counts=prefill, prompt_len=np.full(12, 3), decode_ids=ids, moe_layers=[1, 3])
    return path


def test_the_map_that_is_written_is_valid(counts: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "map.json", tmp_path / "map.png"
    arguments = ["--counts", counts, "--ranks", 4, "--slots", 12, "--batch", 4, "--steps", 32, "--compare"]
    done = CliRunner().invoke(command, [*map(str, arguments), "--out", str(out), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    Geometry(8, 4, 12).check_map(list(document["physical_to_logical"].values()), [1, 3])
    assert list(document["physical_to_logical"]) == ["1", "3"]
    assert "token-balance" in done.output
    assert plot.stat().st_size > 0


def test_counts_without_single_steps_are_drawn_from_the_sums(counts: Path, tmp_path: Path) -> None:
    with np.load(counts) as file:
        ids = file["decode_ids"]
        sums = (ids[..., None] == np.arange(8)).sum(axis=(1, 3))
        path = tmp_path / "sums.npz"
        np.savez(
            path, prefill_counts=file["prefill_counts"], prompt_len=file["prompt_len"], decode_counts=sums
        )
    done = CliRunner().invoke(command, ["--counts", str(path), "--ranks", "2", "--steps", "16"])
    assert done.exit_code == 0, done.output


def test_slots_that_do_not_divide_name_the_nearest_count(counts: Path) -> None:
    """Case 6.1."""
    done = CliRunner().invoke(command, ["--counts", str(counts), "--ranks", "4", "--slots", "10"])
    assert done.exit_code == 1
    assert "nearest valid number is 12 (4 redundant experts)" in done.output
