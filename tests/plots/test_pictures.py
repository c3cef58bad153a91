import dataclasses
from pathlib import Path

import numpy as np
import pytest

from eldr.calibration.counts import Counts
from eldr.calibration.fit import FitSettings, fit
from eldr.calibration.profile import Profile
from eldr.calibration.views import prefill_decode
from eldr.plots import counts_figures, profile_figures
from eldr.plots.pictures import FROM_COUNTS, FROM_PROFILE, NEEDS_COUNTS, write_pictures
from eldr.plots.profile_figures import NoInputError


@pytest.fixture(scope="module")
def counts() -> Counts:
    """48 requests of two domains that prefer different experts."""
    rng = np.random.default_rng(0)
    kind = np.arange(48) % 2

    def draw(tokens: int) -> np.ndarray:
        shares = np.stack([np.linspace(1, 8, 8), np.linspace(8, 1, 8)])[kind]
        shares /= shares.sum(axis=1, keepdims=True)
        return np.stack([rng.multinomial(tokens, share, size=3) for share in shares])

    return Counts(
        ids=tuple(map(str, range(48))),
        fingerprint="model-a",
        top_k=1,
        moe_layers=(1, 3, 5),
        prompt_len=np.full(48, 20),
        prefill_counts=draw(20),
        decode_counts=draw(30),
        domains=tuple(np.array(["law", "code"])[kind].tolist()),
    )


@pytest.fixture(scope="module")
def profile(counts) -> Profile:
    settings = FitSettings(clusters=4, restarts=2)
    return fit(counts, settings, counts_sha256="ab", created="2026-01-01", eldr_version="0").profile


def test_every_picture_is_written(profile, counts, tmp_path):
    written = write_pictures(profile, counts, tmp_path / "new" / "folder")
    assert [picture.name for picture in written] == [*FROM_PROFILE, *FROM_COUNTS]
    for picture in written:
        if picture.name == "idf-per-layer" and np.ptp(profile.idf) == 0:
            continue
        assert picture.path.read_bytes().startswith(b"\x89PNG")


def test_pictures_without_their_input_are_skipped_with_a_reason(profile, tmp_path):
    bare = dataclasses.replace(profile, quality=(), idf=np.ones((3, 8), np.float32))
    reasons = {picture.name: picture.skipped for picture in write_pictures(bare, None, tmp_path)}
    assert all(reasons[name] == NEEDS_COUNTS for name in FROM_COUNTS)
    assert "too few requests" in reasons["rho-per-transform"]
    assert "selected no layers" in reasons["rho-per-layers"]
    assert "learns no weights" in reasons["idf-per-layer"]
    assert list(Path(tmp_path).iterdir()) == []


def test_bars_are_the_held_out_rho_of_each_transform(profile):
    (axes,) = profile_figures.transform_rho(profile).axes
    widths = [bar.get_width() for bar in axes.containers[0]]
    assert sorted(widths) == pytest.approx(sorted(quality.held_out_rho for quality in profile.quality))
    bold = [label.get_text() for label in axes.get_yticklabels() if label.get_fontweight() == "bold"]
    assert bold == [profile.transform]


def test_the_peak_of_the_layer_curve_is_marked(profile):
    (axes,) = profile_figures.layer_rho(profile).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    chosen = next(quality for quality in profile.quality if quality.transform == profile.transform)
    assert lines[profile.transform].get_ydata() == pytest.approx(chosen.curve)
    (peak,) = [line for label, line in lines.items() if label.startswith("peak")]
    assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (len(chosen.mask), max(chosen.curve))


def test_the_heat_map_shows_the_weights_sorted_within_layers(profile):
    idf = np.arange(24, dtype=np.float32).reshape(3, 8)
    made = profile_figures.layer_idf(dataclasses.replace(profile, idf=idf))
    assert np.array_equal(made.axes[0].images[0].get_array(), idf[:, ::-1])
    assert "from 0.00 to 23.00" in made.get_suptitle()


def test_the_map_has_every_domain_and_every_centroid(profile, counts):
    made = counts_figures.signature_map(profile, counts)
    (axes,) = made.axes
    sizes = {drawn.get_label(): len(drawn.get_offsets()) for drawn in axes.collections}
    assert sizes == {"code": 24, "law": 24, "centroid": 4}
    assert sorted(text.get_text() for text in axes.texts) == ["0", "1", "2", "3"]


def test_balanced_sizes_stand_beside_vanilla_ones(profile, counts):
    (axes,) = counts_figures.cluster_sizes(profile, counts).axes
    balanced, vanilla = ([bar.get_height() for bar in bars] for bars in axes.containers)
    assert balanced == [12, 12, 12, 12]
    assert sum(vanilla) == 48


def test_the_scatter_names_its_correlation(profile, counts):
    made = counts_figures.prefill_against_decode(profile, counts)
    mean = prefill_decode(counts.prefill_counts, counts.decode_counts).correlations.mean()
    assert f"correlation {mean:.2f} per expert" in made.get_suptitle()
    touched = (counts.prefill_counts > 0) | (counts.decode_counts > 0)
    assert made.axes[0].collections[0].get_array().sum() == touched.sum()


def test_every_axis_is_labelled(profile, counts):
    for draw in FROM_PROFILE.values():
        if draw is not profile_figures.layer_idf:
            assert draw(profile).axes[0].get_xlabel()
    for draw in FROM_COUNTS.values():
        axes = draw(profile, counts).axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_counts_of_another_model_are_refused_by_field(profile, counts):
    other = dataclasses.replace(counts, fingerprint="model-b")
    with pytest.raises(NoInputError, match="fingerprint differs: the profile has 'model-a'"):
        counts_figures.signature_map(profile, other)
