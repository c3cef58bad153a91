from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from eldr.calibration.profile import Profile
from eldr.cli.main import cli


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Counts of 60 requests of three domains, and a profile of three clusters."""
    rng = np.random.default_rng(0)
    kind = np.arange(60) % 3

    def draw(tokens: int) -> np.ndarray:
        counts = np.zeros((60, 2, 12), dtype=np.int16)
        for row in range(60):
            counts[row, :, 4 * kind[row] : 4 * kind[row] + 4] = rng.multinomial(
                tokens, [0.4, 0.3, 0.2, 0.1], 2
            )
        return counts

    np.savez(
        tmp_path / "counts.npz",
        prefill_counts=draw(20),
        prompt_len=np.full(60, 20),
        decode_counts=draw(30),
        top_k=np.array(1),
    )
    made = run("fit", tmp_path / "counts.npz", "-k", 3, "--out", tmp_path / "three.profile")
    assert made.exit_code == 0, made.output
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_refit_writes_a_profile_for_another_number_of_decoders(folder):
    out = folder / "five.profile"
    result = run("refit", folder / "three.profile", "--counts", folder / "counts.npz", "-k", 5, "--out", out)
    assert result.exit_code == 0, result.output
    assert Profile.load(out).clusters == 5
    assert "clusters = 5" in result.output
    assert "drift from the old profile: within limits" in result.output
    assert "clusters: 3 before, 5 now, anew, matched with the old centroids; sizes 12 to 12" in result.output
    assert "rho unknown" not in result.output


def test_a_profile_may_be_replaced_by_its_refit(folder):
    path = folder / "three.profile"
    before = Profile.load(path)
    result = run("refit", path, "--counts", folder / "counts.npz", "--out", path)
    assert result.exit_code == 0, result.output
    assert "from the old centroids" in result.output
    np.testing.assert_allclose(Profile.load(path).centroids, before.centroids, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"), [(("-k", 0), "clusters must be 1 to 4096, got 0"), (("-k", 61), "cannot cluster")]
)
def test_what_cannot_be_refitted_ends_with_the_reason_and_no_file(folder, options, says):
    out = folder / "new.profile"
    result = run("refit", folder / "three.profile", "--counts", folder / "counts.npz", "--out", out, *options)
    assert result.exit_code == 1
    assert says in result.output
    assert not out.exists()


def test_counts_must_be_named(folder):
    result = run("refit", folder / "three.profile", "--out", folder / "x")
    assert result.exit_code == 2
    assert "--counts" in result.output
