import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.routing.state import DecoderState, DecoderTotals
from eldr.routing.step_time import Observation, StepTimeModel, observe


def true_time(batch, union_share):
    """The testbed's CPU engine: 11.2 ms + 1.29 ms * n + 0.65 ms * U, U = 128 * share."""
    return 11.2e-3 + 1.29e-3 * batch + 83.2e-3 * union_share


def observations(count, noise=0.03, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        batch, union = rng.uniform(4, 32), rng.uniform(0.1, 0.9)
        yield Observation(batch, union, true_time(batch, union) * rng.normal(1, noise), 10)


def predict(model, batch, union_share):
    fit = model.coefficients
    return fit.base_s + fit.per_request_s * batch + fit.per_union_s * union_share


def test_before_any_report_the_prior_stands():
    assert StepTimeModel().coefficients == StepTimeModel.PRIOR


def test_the_fit_finds_the_coefficients():
    model = StepTimeModel()
    for seen in observations(500):
        model.observe(seen)
    fit = model.coefficients
    assert fit.base_s == pytest.approx(11.2e-3, rel=0.15)
    assert fit.per_request_s == pytest.approx(1.29e-3, rel=0.1)
    assert fit.per_union_s == pytest.approx(83.2e-3, rel=0.05)


def test_a_few_reports_of_one_batch_size_set_the_scale():
    model = StepTimeModel()
    for _ in range(5):
        model.observe(Observation(16, 0.4, true_time(16, 0.4), 10))
    assert predict(model, 16, 0.4) == pytest.approx(true_time(16, 0.4), rel=0.02)
    assert predict(model, 17, 0.4) > predict(model, 16, 0.4)
    assert predict(model, 16, 0.5) > predict(model, 16, 0.4)


def test_single_stalls_do_not_move_the_fit():
    model = StepTimeModel()
    for i, seen in enumerate(observations(600)):
        stalled = 20.0 if i > 50 and i % 25 == 0 else 1.0
        model.observe(Observation(seen.batch, seen.union_share, seen.step_time_s * stalled, 10))
    assert predict(model, 16, 0.5) == pytest.approx(true_time(16, 0.5), rel=0.1)
    assert model.outliers > 10


def test_a_lasting_change_is_learned():
    model = StepTimeModel()
    for seen in observations(500):
        model.observe(seen)
    for seen in observations(1500, seed=1):
        model.observe(Observation(seen.batch, seen.union_share, 2 * seen.step_time_s, 10))
    assert predict(model, 16, 0.5) == pytest.approx(2 * true_time(16, 0.5), rel=0.2)


@given(
    st.lists(
        st.builds(
            Observation,
            st.floats(0.5, 500),
            st.floats(0.001, 1.0),
            st.floats(1e-4, 1e3),
            st.integers(1, 1000),
        ),
        max_size=60,
    )
)
def test_coefficients_are_finite_and_load_always_costs(seen):
    model = StepTimeModel()
    for each in seen:
        model.observe(each)
    fit = model.coefficients
    assert np.isfinite([fit.base_s, fit.per_request_s, fit.per_union_s]).all()
    assert fit.base_s >= 0
    assert fit.per_union_s >= 0
    assert fit.per_request_s > 0


def report(steps=0, tokens=0, union_tokens=0.0, seconds=0.0, incarnation="i1", **changes):
    totals = DecoderTotals(
        decode_steps=steps, decode_tokens=tokens, union_tokens=union_tokens, step_time_s=seconds
    )
    return DecoderState("d0", incarnation, sequence=1, totals=totals, **changes)


def test_two_reports_give_the_means_of_the_time_between():
    before = report(100, 1600, 48_000.0, 5.0)
    after = report(110, 1800, 56_000.0, 5.9)
    assert observe(before, after, experts=128) == Observation(
        20.0, pytest.approx(40 / 128), pytest.approx(0.09), 10, worker_id="d0"
    )


def test_no_step_between_two_reports_says_nothing():
    before = report(100, 1600, 48_000.0, 5.0)
    assert observe(before, before, experts=128) is None


def test_without_an_earlier_report_of_the_process_the_last_step_counts():
    now = report(3, 9, 60.0, 0.2, batch_last=4, union_last=12.8, step_time_last_s=0.05)
    other_process = report(90, 900, 9000.0, 9.0, incarnation="i0")
    for previous in (None, other_process):
        assert observe(previous, now, experts=128) == Observation(
            4.0, pytest.approx(0.1), 0.05, 1, worker_id="d0"
        )


def test_what_cannot_be_is_not_learned_from():
    assert observe(None, report(), experts=128) is None
    assert observe(None, report(batch_last=1, union_last=200.0, step_time_last_s=0.1), experts=128) is None
