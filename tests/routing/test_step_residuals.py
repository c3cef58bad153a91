import numpy as np
import pytest

from eldr.routing.step_residuals import BatchCorrection, DecoderSpeeds


def test_a_break_point_is_followed_and_its_neighbours_are_not():
    correction = BatchCorrection()
    for _ in range(400):
        correction.observe(64, np.log(1.3), 1.0)
        correction.observe(8, 0.0, 1.0)
    assert correction.factor(64) == pytest.approx(1.3, abs=0.06)
    assert correction.factor(8) == pytest.approx(1.0, abs=0.03)
    assert correction.factors(np.array([64.0]))[0] == pytest.approx(correction.factor(64))


def test_a_slower_decoder_gets_a_speed_of_its_own_within_seconds():
    speeds, rng = DecoderSpeeds(), np.random.default_rng(0)
    for _ in range(40):
        for i in range(4):
            speeds.observe(f"d{i}", (np.log(1.5) if i == 3 else 0.0) + rng.normal(0, 0.03), 1.0)
    assert speeds.speed("d3") == pytest.approx(1.5, rel=0.05)
    assert speeds.speed("d0") == pytest.approx(1.0, abs=0.02)
    speeds.forget("d3")
    assert speeds.speed("d3") == 1.0


def test_noise_that_hangs_together_makes_no_speed():
    """A starved fleet: step times differ from minute to minute by who gets the core."""
    speeds, rng = DecoderSpeeds(), np.random.default_rng(1)
    level = np.zeros(4)
    for _ in range(300):
        level = 0.8 * level + rng.normal(0, 0.2, 4)
        for i in range(4):
            speeds.observe(f"d{i}", level[i], 1.0)
    assert all(abs(speeds.speed(f"d{i}") - 1) < 0.15 for i in range(4))
