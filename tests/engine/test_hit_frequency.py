"""The share of recent decode steps that touched each expert."""

import numpy as np
import numpy.typing as npt
import pytest

from eldr.engine.hit_frequency import FOLD_AT, HitFrequency

EXPERTS = 11


def unions(steps: int, seed: int = 0) -> npt.NDArray[np.bool_]:
    return np.random.default_rng(seed).random((steps, 3, EXPERTS)) < 0.3


def one_by_one(steps: npt.NDArray[np.bool_], window: int) -> npt.NDArray[np.float64]:
    hit = steps[0].astype(np.float64)
    for step in steps[1:]:
        hit += (step - hit) / window
    return hit


@pytest.mark.parametrize("window", [1, 4, 50])
@pytest.mark.parametrize("steps", [1, 2, FOLD_AT - 1, FOLD_AT, FOLD_AT + 1, 3 * FOLD_AT + 5])
@pytest.mark.parametrize("every", [1, 7, 1000])
def test_it_is_the_same_however_often_it_is_read(window: int, steps: int, every: int) -> None:
    seen = unions(steps)
    frequency = HitFrequency(window)
    for index, step in enumerate(seen):
        frequency.add(step)
        if index % every == 0:
            frequency.read()
    hit = frequency.read()
    assert hit is not None
    assert hit.dtype == np.float32
    np.testing.assert_allclose(hit, one_by_one(seen, window), atol=1e-6)


def test_there_is_none_before_the_first_step() -> None:
    assert HitFrequency(4).read() is None


def test_what_was_read_never_changes() -> None:
    frequency = HitFrequency(4)
    steps = unions(2)
    frequency.add(steps[0])
    before = frequency.read()
    assert before is not None
    kept = before.copy()
    frequency.add(steps[1])
    frequency.read()
    np.testing.assert_array_equal(before, kept)


def test_steps_that_nobody_reads_take_bounded_memory() -> None:
    frequency = HitFrequency(4)
    for step in unions(5 * FOLD_AT):
        frequency.add(step)
        assert len(frequency._steps) < FOLD_AT


def test_it_stays_a_share() -> None:
    frequency = HitFrequency(3)
    for _ in range(1000):
        frequency.add(np.ones((3, EXPERTS), bool))
    hit = frequency.read()
    assert hit is not None
    assert hit.max() <= 1.0
