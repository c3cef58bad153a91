import itertools

import numpy as np
import pytest

from eldr.simulator.clairvoyant import Moment, clairvoyance, dealt, mean_step_ms, searched
from eldr.simulator.step_time import StepTime

STEP = StepTime(2.0, 0.1, 0.5)


def moment(seed=0, requests=7, decoders=2, step_times=None, max_batch=512):
    """Requests of two kinds that like different halves of eight experts."""
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0, 0.2, (requests, 2, 8))
    for row in range(requests):
        half = slice(0, 4) if row % 2 else slice(4, 8)
        shares[row, :, half] = rng.uniform(0.3, 0.95, (2, 4))
    on = np.arange(requests) // 2 % decoders
    return Moment(shares.astype(np.float32), on, step_times or (STEP,) * decoders, max_batch)


def exhaustive_ms(of):
    """The objective, from its definition, over every placement."""
    best = np.inf
    for places in itertools.product(range(len(of.step_times)), repeat=len(of.shares)):
        on = np.array(places)
        if np.bincount(on).max() <= of.max_batch:
            best = min(best, defined_ms(of, on))
    return best


def defined_ms(of, on):
    total = 0.0
    for decoder, step in enumerate(of.step_times):
        batch = of.shares[on == decoder].astype(float)
        if len(batch):
            union = (1 - np.prod(1 - batch, axis=0)).sum(axis=1).mean()
            total += len(batch) * step.seconds(len(batch), union) * 1e3
    return total / len(on)


def test_the_objective_is_the_mean_step_time_of_the_requests():
    of = moment()
    assert mean_step_ms(of, of.on) == pytest.approx(defined_ms(of, of.on), rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("decoders", [2, 3])
def test_the_search_from_some_starts_finds_what_trying_everything_finds(seed, decoders):
    of = moment(seed, decoders=decoders)
    rng = np.random.default_rng(seed)
    starts = [of.on, *(dealt(of, rng) for _ in range(10))]
    found = min(defined_ms(of, searched(of, start)) for start in starts)
    assert found == pytest.approx(exhaustive_ms(of), rel=1e-5)


def test_a_slow_decoder_gets_less_and_a_full_one_no_more():
    slow = StepTime(2.0, 0.1, 0.5, speed=0.3)
    of = moment(requests=8, step_times=(STEP, slow))
    counts = np.bincount(searched(of, of.on), minlength=2)
    assert counts[1] < counts[0]
    full = moment(requests=8, step_times=(STEP, slow), max_batch=5)
    assert np.bincount(searched(full, full.on), minlength=2).max() <= 5
    assert mean_step_ms(full, searched(full, full.on)) >= exhaustive_ms(full) * (1 - 1e-6)


def test_no_move_and_no_swap_makes_the_result_better():
    of = moment(3, requests=30, decoders=3)
    on = searched(of, of.on)
    best = defined_ms(of, on)
    for row, decoder in itertools.product(range(30), range(3)):
        other = on.copy()
        other[row] = decoder
        assert defined_ms(of, other) > best * (1 - 1e-5)
    for one, two in itertools.combinations(range(30), 2):
        other = on.copy()
        other[[one, two]] = on[[two, one]]
        assert defined_ms(of, other) > best * (1 - 1e-5)


def test_a_deal_is_balanced_and_reaches_nothing_on_average():
    of = moment(1, requests=40, decoders=4)
    on = dealt(of, np.random.default_rng(0))
    assert np.bincount(on).tolist() == [10] * 4
    random = [
        clairvoyance([Moment(of.shares, dealt(of, np.random.default_rng(seed)), of.step_times)], deals=32)
        for seed in range(8)
    ]
    assert np.mean([found.reached for found in random]) == pytest.approx(0, abs=0.15)


def test_the_bound_is_never_above_what_was_placed():
    of = moment(2, requests=20, decoders=4)
    best = searched(of, of.on)
    placed = Moment(of.shares, best, of.step_times)
    found = clairvoyance([of, placed])
    assert found.best_ms <= found.placed_ms <= found.balanced_ms
    assert 0 < found.possible < 1
    assert clairvoyance([placed]).reached > 0.9
    with pytest.raises(ValueError, match="at least one moment"):
        clairvoyance([])
