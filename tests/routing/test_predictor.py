import dataclasses

import numpy as np
import pytest

from eldr.routing.predictor import PLAIN, Lesson, Predictor
from eldr.testing.signatures import fake_signature


def test_before_data_shares_are_counts_over_tokens():
    signature = fake_signature((0, 1, 2), tokens=30)
    assert Predictor().shares(signature) == pytest.approx(signature.shares().ravel())


def test_a_steady_difference_of_decode_is_learned_once_proven():
    predictor = Predictor(trusted_after=64)
    signature = fake_signature((0, 1, 2, 3), tokens=40)
    decode = np.rint(signature.shares() * 100 * np.array([1.6, 0.4] * 4)).astype(np.int64)
    for _ in range(63):
        predictor.observe(signature, decode, 100)
    assert predictor.form is PLAIN
    for _ in range(65):
        predictor.observe(signature, decode, 100)
    assert predictor.form.ratios
    wrong = np.abs(predictor.shares(signature) - decode.ravel() / 100).max()
    assert wrong < np.abs(signature.shares() - decode / 100).max() / 2


def test_where_prompts_tell_everything_plain_stays():
    predictor, rng = Predictor(), np.random.default_rng(0)
    for _ in range(300):
        signature = fake_signature(tuple(rng.choice(8, 2, replace=False)), tokens=40)
        predictor.observe(signature, (signature.shares() * 100).astype(np.int64), 100)
    assert predictor.form is PLAIN
    assert predictor.errors[PLAIN] < 0.02


@pytest.mark.parametrize(
    ("counts", "tokens", "lesson"),
    [
        (np.ones((2, 8), np.int64), 3, Lesson.SHORT),
        (np.ones((3, 8), np.int64), 300, Lesson.OTHER_SHAPE),
        (np.full((2, 8), np.nan), 300, Lesson.NOT_COUNTS),
        (np.full((2, 8), np.inf), 300, Lesson.NOT_COUNTS),
        (np.full((2, 8), -1), 300, Lesson.NOT_COUNTS),
        (np.zeros((2, 8), np.int64), 300, Lesson.EMPTY),
    ],
)
def test_what_are_no_counts_teaches_nothing_and_is_named(counts, tokens, lesson):
    predictor = Predictor()
    assert predictor.observe(fake_signature(), counts, tokens) is lesson
    assert predictor.observations == 0
    assert predictor.observe(fake_signature(), np.ones((2, 8), np.int64), 300) is Lesson.LEARNED
    assert all(np.isfinite(error) for error in predictor.errors.values())


def test_another_model_begins_anew():
    predictor = Predictor(trusted_after=64)
    signature = fake_signature((0, 1, 2, 3), tokens=40)
    decode = np.rint(signature.shares() * 100 * np.array([1.6, 0.4] * 4)).astype(np.int64)
    for _ in range(128):
        predictor.observe(signature, decode, 100)
    other = dataclasses.replace(signature, fingerprint="other")
    assert predictor.form.ratios
    assert predictor.shares(other) == pytest.approx(other.shares().ravel())
    predictor.observe(other, decode, 100)
    assert (predictor.form, predictor.observations) == (PLAIN, 1)
