import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner, Result

from eldr.calibration.fit_record import ClusterRecord, Provenance, TransformQuality
from eldr.calibration.profile import Profile
from eldr.cli.main import cli


@pytest.fixture
def profile_path(tmp_path):
    path = tmp_path / "p.eldr"
    Profile(
        fingerprint="model-a",
        moe_layers=(1, 3),
        experts=4,
        top_k=2,
        transform="sqrt",
        idf=np.ones((2, 4), np.float32),
        layer_mask=(1,),
        centroids=np.eye(2, 4, dtype=np.float32),
        quality=(
            TransformQuality("sqrt", 0.8, 0.70, 0.75, (1,), (1, 0), (0.75, 0.7)),
            TransformQuality("count", 0.7, 0.65, 0.65, (0, 1)),
        ),
        clustering=ClusterRecord((3, 2), True, 0.9, 7, True, 5),
        provenance=Provenance("ab12", 5, "2026-01-02T03:04:05+00:00", "0.1.0", 3),
        warnings=("one [bold] warning",),
    ).save(path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)])


def test_inspect_says_everything_in_words(profile_path):
    result = run(profile_path)
    assert result.exit_code == 0, result.output
    for words in (
        "model: 2 MoE layers x 4 experts, top-2, fingerprint model-a",
        "signature: sqrt on 1 of 2 layers (3), 4 dimensions",
        "rho: 0.7500 on held-out requests",
        "+0.0500 by the layer mask, +0.1000 against count",
        "clusters: 2, balanced, sizes 2 to 3: 3, 2",
        "converged after 7 iterations",
        "5 requests, seed 3, counts sha256 ab12",
        "warning: one [bold] warning",
    ):
        assert words in result.output


def test_json_is_the_whole_output(profile_path):
    found = json.loads(run(profile_path, "--json").output)
    assert found["geometry"] == {"fingerprint": "model-a", "moe_layers": [1, 3], "experts": 4, "top_k": 2}
    assert found["mask"] == {"positions": [1], "layers": [3], "dimensions": 4}
    assert found["rho"]["gain_over"] == pytest.approx({"count": 0.1})
    assert found["clusters"]["sizes"] == [3, 2]
    assert [row["transform"] for row in found["transforms"]] == ["sqrt", "count"]


def test_pictures_are_written_and_missing_ones_named(profile_path, tmp_path):
    result = run(profile_path, "--plots", tmp_path / "pics")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pics" / "rho-per-transform.png").exists()
    assert "skipped idf-per-layer: transform sqrt learns no weights" in result.output
    assert "skipped signature-pca: needs the counts" in result.output


def test_missing_matplotlib_is_an_error_that_says_what_to_install(profile_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(profile_path, "--plots", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'eldr[plots]'" in result.output


def test_a_file_that_is_no_profile_is_named(tmp_path):
    (tmp_path / "x").write_bytes(b"PK junk")
    result = run(tmp_path / "x")
    assert result.exit_code == 1
    assert "not an eldr profile" in result.output


def test_counts_without_plots_is_a_usage_error(profile_path):
    result = run(profile_path, "--counts", profile_path)
    assert result.exit_code == 2
    assert "add --plots DIR" in result.output
