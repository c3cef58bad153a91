from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from eldr.calibration.profile import Profile
from eldr.cli.main import cli


@pytest.fixture
def counts_path(tmp_path: Path) -> Path:
    """32 requests of two domains that use disjoint experts; no fingerprint."""
    rng = np.random.default_rng(0)
    kind = np.arange(32) % 2

    def draw(tokens: int) -> np.ndarray:
        low = rng.multinomial(tokens, [0.4, 0.3, 0.2, 0.1], size=(32, 2))
        counts = np.zeros((32, 2, 8), dtype=np.int16)
        for row in range(32):
            counts[row, :, 4 * kind[row] : 4 * kind[row] + 4] = low[row]
        return counts

    path = tmp_path / "counts.npz"
    np.savez(
        path,
        prefill_counts=draw(20),
        prompt_len=np.full(32, 20),
        decode_counts=draw(30),
        domain=np.array(["law", "code"])[kind],
        top_k=np.array(1),
    )
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["fit", *map(str, arguments)])


def test_fit_writes_a_profile_and_reports_it(counts_path, tmp_path):
    out = tmp_path / "profile.eldr"
    result = run(counts_path, "--clusters", 2, "--out", out, "--seed", 3)
    assert result.exit_code == 0, result.output
    profile = Profile.load(out)
    assert profile.clusters == 2
    assert profile.clustering.sizes == (16, 16)
    assert profile.provenance.seed == 3
    assert "seed = 3" in result.output
    assert "count-smoothed-idf" in result.output
    assert f"chosen: {profile.transform} on" in result.output
    assert "law 16" in result.output
    assert "code 16" in result.output
    assert "warning: the counts carry no model fingerprint" in result.output
    assert f"wrote {out}" in result.output.replace("\n", "")


def test_two_runs_differ_in_their_date_only(counts_path, tmp_path):
    for name in ("a", "b"):
        assert run(counts_path, "-k", 2, "--out", tmp_path / name, "--transform", "sqrt").exit_code == 0
    first, second = Profile.load(tmp_path / "a"), Profile.load(tmp_path / "b")
    assert np.array_equal(first.centroids, second.centroids)
    assert first.quality == second.quality
    assert first.provenance.counts_sha256 == second.provenance.counts_sha256


def test_several_counts_files_are_fitted_as_one(counts_path, tmp_path):
    halves = []
    with np.load(counts_path) as whole:
        for name, rows in (("first", slice(0, 16)), ("second", slice(16, 32))):
            arrays = {key: whole[key][rows] if whole[key].ndim else whole[key] for key in whole.files}
            ids = np.array([str(row) for row in range(32)])[rows]
            np.savez(tmp_path / f"{name}.npz", ids=ids, **arrays)
            halves.append(tmp_path / f"{name}.npz")
    assert run(*halves, "-k", 2, "--out", tmp_path / "a").exit_code == 0
    assert run(counts_path, "-k", 2, "--out", tmp_path / "b").exit_code == 0
    first, second = Profile.load(tmp_path / "a"), Profile.load(tmp_path / "b")
    assert np.array_equal(first.centroids, second.centroids)
    assert first.quality == second.quality


def test_a_named_transform_on_all_layers_is_kept(counts_path, tmp_path):
    result = run(
        counts_path, "-k", 2, "--out", tmp_path / "p", "--transform", "binary", "--mask", "all", "--vanilla"
    )
    assert result.exit_code == 0, result.output
    profile = Profile.load(tmp_path / "p")
    assert (profile.transform, profile.layer_mask) == ("binary", (0, 1))
    assert not profile.clustering.balanced


def test_a_setting_out_of_range_ends_with_its_name_and_no_file(counts_path, tmp_path):
    result = run(counts_path, "-k", 99, "--out", tmp_path / "p")
    assert result.exit_code == 1
    assert "Error: clusters must be at most the 32 usable requests, got 99" in result.output
    assert not (tmp_path / "p").exists()


def test_a_broken_counts_file_ends_with_what_is_wrong(counts_path, tmp_path):
    counts_path.write_bytes(b"nothing")
    result = run(counts_path, "-k", 2, "--out", tmp_path / "p")
    assert result.exit_code == 1
    assert "counts.npz: not an npz file" in result.output


def test_an_out_folder_that_does_not_exist_ends_with_its_name(counts_path, tmp_path):
    result = run(counts_path, "-k", 2, "--out", tmp_path / "none" / "p")
    assert result.exit_code == 1
    assert "none" in result.output


def test_help_explains_every_option():
    output = run("--help").output
    for option in ("--clusters", "--transform", "--mask", "--seed", "--restarts", "--held-out", "--pairs"):
        assert option in output
