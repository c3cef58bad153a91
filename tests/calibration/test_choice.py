import numpy as np
import pytest

from eldr.calibration.choice import choose
from eldr.signature.transform import TRANSFORMS


def choose_from(counts, transforms=tuple(TRANSFORMS), **options):
    options = {"select": True, "held_out": 0.3, "max_pairs": 2_000, "seed": 0, **options}
    return choose(counts.prefill_counts, counts.decode_counts, transforms, **options)


def test_the_best_held_out_rho_wins(make_counts):
    choice = choose_from(make_counts(80))
    best = max(choice.qualities, key=lambda quality: quality.best_held_out_rho)
    assert choice.transform == best.transform
    assert [quality.transform for quality in choice.qualities] == list(TRANSFORMS)


def test_the_choice_is_said_with_its_margin(make_counts):
    choice = choose_from(make_counts(80))
    figures = sorted((quality.best_held_out_rho for quality in choice.qualities), reverse=True)
    assert f"rho {figures[0]:.4f} on held-out requests" in choice.sentence
    assert f"{figures[0] - figures[1]:.4f} above" in choice.sentence


def test_noise_layers_are_masked_out_where_that_helps_held_out_requests(make_counts):
    counts = make_counts(120)
    noise = np.random.default_rng(1).multinomial(2_000, np.ones(12) / 12 * 1.0, size=(120, 3))
    spikes = noise * np.random.default_rng(2).integers(0, 2, size=(120, 3, 12)) * 10
    prefill = np.concatenate([spikes, counts.prefill_counts], axis=1)
    decode = np.concatenate([np.ones_like(counts.decode_counts), counts.decode_counts], axis=1)
    choice = choose(prefill, decode, ["count"], select=True, held_out=0.3, max_pairs=5_000, seed=0)
    assert set(choice.layers) <= {3, 4, 5}
    quality = choice.qualities[0]
    assert quality.held_out_mask_rho > quality.held_out_rho
    assert sorted(quality.order) == list(range(6))
    assert len(quality.curve) == 6
    assert "(kept)" in choice.sentence


def test_all_layers_are_kept_where_a_mask_does_not_help(make_counts):
    choice = choose_from(make_counts(60), ["count"])
    quality = choice.qualities[0]
    expected = quality.mask if quality.held_out_mask_rho > quality.held_out_rho else (0, 1, 2)
    assert choice.layers == expected


def test_without_selection_all_layers_count_and_no_curve_is_made(make_counts):
    choice = choose_from(make_counts(60), select=False)
    assert choice.layers == (0, 1, 2)
    assert all(quality.order == quality.curve == () for quality in choice.qualities)


def test_hopeless_transforms_are_not_selected_on(make_counts):
    counts = make_counts(80)
    everywhere = counts.prefill_counts + np.uint8(1)  # every expert is touched: binary says nothing
    choice = choose(
        everywhere,
        counts.decode_counts,
        ["count", "binary"],
        select=True,
        held_out=0.3,
        max_pairs=2_000,
        seed=0,
    )
    figures = {quality.transform: quality for quality in choice.qualities}
    assert figures["binary"].rho == 0.0
    assert figures["binary"].order == ()
    assert figures["count"].order != ()


def test_equal_figures_go_to_the_earlier_transform(make_counts):
    choice = choose_from(make_counts(60), ["count", "count"])
    assert choice.qualities[0] == choice.qualities[1]
    assert "0.0000 above count" in choice.sentence


@pytest.mark.parametrize(("select", "steps"), [(True, 10), (False, 5)])
def test_progress_ends_at_the_last_step(make_counts, select, steps):
    heard = []
    choose_from(make_counts(60), select=select, progress=lambda done, total: heard.append((done, total)))
    assert heard == [(step, steps) for step in range(1, steps + 1)]


def test_equal_seeds_give_equal_choices(make_counts):
    assert choose_from(make_counts(60), seed=4) == choose_from(make_counts(60), seed=4)
    assert choose_from(make_counts(60), seed=4) != choose_from(make_counts(60), seed=5)


def test_gate_transforms_are_reported_beside_the_others_and_never_chosen(make_counts):
    counts = make_counts(80)
    gates = {"gate_probability": counts.decode_counts.astype(np.float32)}  # as good as can be
    choice = choose_from(counts, gates=gates)
    assert [quality.transform for quality in choice.qualities] == [*TRANSFORMS, "gate-probability"]
    assert choice.qualities[-1].held_out_rho == pytest.approx(1.0)
    assert choice.transform in TRANSFORMS


def test_a_gain_within_chance_is_called_so(make_counts):
    choice = choose_from(make_counts(60))
    assert choice.gain is not None
    assert ("within chance" in choice.sentence) == (choice.gain[0] <= 0)
    assert choose_from(make_counts(60), ["count"]).gain is None
