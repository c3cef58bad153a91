"""A fixed number of requests in flight."""

import pytest
from small_worlds import SHAPE, TOP_K, prompt

from eldr.simulator.closed_loop import ClosedLoop
from eldr.simulator.simulation import Arrival, Topology
from eldr.simulator.step_time import StepTime

TEN_MS = Topology(prefill=1, decode=2, step_time=StepTime(10.0, 0.0, 0.0), transfer_s=0.0)


def arrivals(count):
    return [Arrival(0.0, f"r{i}", prompt(), 5) for i in range(count)]


def test_the_next_request_arrives_when_one_has_ended():
    outcomes = ClosedLoop(2, TEN_MS, "round-robin", {}, SHAPE, TOP_K).run(arrivals(6))
    assert len(outcomes.finished) == 6
    assert (outcomes.left, outcomes.refused) == (0, 0)
    spans = [(arrival.at_s, running.last_s) for arrival, running in outcomes.finished]
    for at_s, _ in spans:
        assert sum(begin <= at_s < end for begin, end in spans) <= 2


def test_fewer_requests_than_connections_all_arrive_at_once():
    outcomes = ClosedLoop(9, TEN_MS, "jsq", {}, SHAPE, TOP_K).run(arrivals(3))
    assert [arrival.at_s for arrival, _ in outcomes.finished] == [0.0, 0.0, 0.0]


def test_no_request_in_flight_is_no_loop():
    with pytest.raises(ValueError, match="in_flight must be at least 1, got 0"):
        ClosedLoop(0, TEN_MS, "jsq", {}, SHAPE, TOP_K)
