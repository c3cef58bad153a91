import numpy as np
import pytest
from small_worlds import SHAPE, prompt

from eldr.simulator.decoder import Running, SimDecoder, bit_sets
from eldr.simulator.step_time import StepTime

STEP = StepTime(8.0, 1.0, 0.5)
ONE = STEP.seconds(1, 2.0)
"""One request that touches two experts per layer: 10 ms."""


def decoder(exact=False, most=4):
    return SimDecoder("d", STEP, SHAPE, most, exact)


def ran(sim):
    """Runs to the end; the requests in the order they ended."""
    ended = []
    while sim.running:
        ended += sim.advance(sim.next_change_s())
    return ended


@pytest.mark.parametrize("exact", [False, True])
def test_a_request_alone_takes_the_models_step_time_per_token(exact):
    sim = decoder(exact)
    sim.arrive(Running("r", prompt(), 20), 3.0)
    (request,) = ran(sim)
    assert request.first_s == pytest.approx(3.0 + ONE, rel=1e-5)
    assert request.last_s == pytest.approx(3.0 + 20 * ONE, rel=1e-5)
    assert sim.totals.steps == sim.totals.tokens == 20
    assert sim.totals.union_tokens == pytest.approx(40, rel=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_requests_that_come_mid_step_join_at_its_end(exact):
    sim = decoder(exact)
    sim.arrive(Running("r0", prompt(), 20), 0.0)
    middle = 2.5 * ONE
    if exact:
        for _ in range(2):
            sim.advance(sim.next_change_s())
    for name in ("r1", "r2"):
        sim.arrive(Running(name, prompt((2, 3)), 20), middle)
    boundary = sim.boundary_s(middle)
    assert boundary == pytest.approx(3 * ONE, rel=1e-5)
    assert list(sim.running) == ["r0"]
    sim.advance(boundary)
    assert list(sim.running) == ["r0", "r1", "r2"]
    assert {sim.running[name].joined_s for name in ("r1", "r2")} == {boundary}
    three = STEP.seconds(3, 4.0)
    first, *others = ran(sim)
    assert first.last_s == pytest.approx(boundary + 17 * three, rel=1e-4)
    assert others[0].first_s == pytest.approx(boundary + three, rel=1e-4)
    assert others[0].last_s == pytest.approx(first.last_s + 3 * STEP.seconds(2, 2.0), rel=1e-4)


def test_a_full_decoder_lets_one_in_when_one_ends():
    sim = decoder(most=1)
    sim.arrive(Running("r0", prompt(), 5), 0.0)
    sim.arrive(Running("r1", prompt(), 5), 0.001)
    assert (len(sim.running), sim.in_flight) == (1, 2)
    (first,) = sim.advance(sim.next_change_s())
    assert sim.running["r1"].joined_s == first.last_s == pytest.approx(5 * ONE, rel=1e-5)


def test_expected_unions_are_near_exact_ones_where_picks_are_independent():
    rng = np.random.default_rng(0)
    found = []
    for exact in (False, True):
        sim = decoder(exact, most=64)
        for number in range(4):
            made = prompt()
            made.routes[:] = 0
            routes = np.argsort(rng.random((400, SHAPE[0], SHAPE[1])), axis=-1)[..., :2].astype(np.uint8)
            shares = np.full(SHAPE, 0.25, np.float32)
            sim.arrive(Running(f"r{number}", type(made)("a", made.signature, shares, routes), 400), 0.0)
        sim.advance(sim.boundary_s(0.001))
        ran(sim)
        found.append(sim.totals.union_tokens / sim.totals.tokens)
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[0] == pytest.approx(8 * (1 - 0.75**4), rel=0.02)


def test_a_report_counts_whole_steps_and_names_what_it_holds():
    sim = decoder()
    assert sim.report(0.0).hit_frequency is None
    sim.arrive(Running("r0", prompt(), 20), 0.0)
    sim.arrive(Running("r1", prompt(), 20), 0.001)
    state = sim.report(3.5 * ONE)
    assert (sim.totals.steps, state.running, state.waiting) == (3, 1, 1)
    assert state.reservation_ids == {"r0", "r1"}
    assert state.kv_tokens == 10 + 3
    assert state.step_time_last_s == pytest.approx(ONE, rel=1e-5)
    assert state.hit_frequency[0, 0] == pytest.approx(1 - (15 / 16) ** 3, rel=1e-3)
    assert sim.report(3.6 * ONE).sequence == state.sequence + 1


def test_a_dead_decoder_gives_up_all_it_had():
    sim = decoder()
    for name in ("r0", "r1"):
        sim.arrive(Running(name, prompt(), 20), 0.0)
    assert [request.request_id for request in sim.drop_all()] == ["r0", "r1"]
    assert sim.failed
    assert sim.in_flight == 0


def test_step_times_follow_break_points_and_speed():
    model = StepTime(10.0, 0.0, 0.0, speed=0.5, factors=((8, 2.0), (16, 1.0)))
    assert [model.seconds(n, 0) for n in (7, 8, 16)] == pytest.approx([0.02, 0.04, 0.02])
    with pytest.raises(ValueError, match="speed"):
        StepTime(1.0, 1.0, 1.0, speed=0.0)
    with pytest.raises(ValueError, match="ascend"):
        StepTime(1.0, 1.0, 1.0, factors=((8, 1.0), (4, 1.0)))


@pytest.mark.parametrize("experts", [8, 64, 65, 200])
def test_bit_sets_hold_the_picks(experts):
    routes = np.random.default_rng(0).integers(experts, size=(5, 3, 4)).astype(np.uint8)
    masks = bit_sets(routes, experts)
    assert masks.shape == (5, 3, -(-experts // 64))
    for step, layer in np.ndindex(5, 3):
        bits = np.unpackbits(masks[step, layer].view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits)) == set(routes[step, layer])


def test_an_exact_decoder_refuses_a_request_without_routes():
    made = prompt()
    bare = type(made)(made.domain, made.signature, made.shares)
    with pytest.raises(ValueError, match="r0 has no routes"):
        decoder(exact=True).arrive(Running("r0", bare, 3), 0.0)
