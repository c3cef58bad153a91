import pytest
from small_worlds import prompt

from eldr.simulator.decoder import Running
from eldr.simulator.measures import EmptyRunError, figures_of, interval
from eldr.simulator.simulation import Arrival, Outcomes


def outcomes():
    out = Outcomes(token_steps=10, union_tokens=30)
    for number in range(5):
        request = Running(
            f"r{number}", prompt(), 11, first_s=number + 0.5, last_s=number + 0.6 + 0.1 * number
        )
        out.finished.append((Arrival(float(number), request.request_id, request.prompt, 11), request))
    return out


def test_tpot_is_the_gap_between_first_and_last_token_per_further_token():
    figures = figures_of(outcomes(), 2.0, 5.0)
    assert figures.requests == 3
    assert figures.tpot_p50_ms == pytest.approx(40)
    assert figures.ttft_p50_ms == pytest.approx(500)
    assert figures.union == pytest.approx(3)
    assert figures.tpot_quantiles_ms[0] == pytest.approx(30)


def test_a_run_without_requests_is_an_error():
    with pytest.raises(EmptyRunError, match="after 9 s"):
        figures_of(outcomes(), 9.0, 10.0)


def test_errors_are_means_of_what_was_seen_after_the_warm_up():
    out = outcomes()
    assert figures_of(out, 2.0, 5.0).step_time_error is None
    out.step_errors = [(1.0, 9.0), (3.0, 0.1), (4.0, 0.3)]
    out.share_errors = [(1.0, 9.0), (3.0, 0.5)]
    figures = figures_of(out, 2.0, 5.0)
    assert figures.step_time_error == pytest.approx(0.2)
    assert figures.share_error == pytest.approx(0.5)


def test_the_interval_is_students():
    assert interval([1.0]) == (1.0, 0.0)
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-3))
