import pytest
from policy_fleets import state

from eldr.routing.carried import CarriedBookings
from eldr.routing.contract import Booking
from eldr.routing.state import DecoderTotals

MINE = {rid: Booking(rid, None) for rid in ("a", "b")}


def report(steps, *rids, incarnation="i1"):
    totals = DecoderTotals(decode_steps=steps)
    made = state("d0", len(rids), reservation_ids=frozenset(rids), totals=totals)
    object.__setattr__(made, "incarnation", incarnation)
    return made


def missing(fresh):
    return {booking.reservation_id: share for booking, share in fresh}


def test_a_booking_counts_as_begun_halfway_between_the_reports():
    carried = CarriedBookings(window_steps=16)
    first, second = report(100), report(120, "a")
    carried.report(None, first, MINE)
    assert missing(carried.report(first, second, MINE)) == {"a": pytest.approx((15 / 16) ** 10)}


def test_a_booking_that_ran_for_long_misses_nothing():
    carried = CarriedBookings(window_steps=16)
    reports = [report(100, "a"), report(110, "a"), report(400, "a", "b")]
    carried.report(None, reports[0], MINE)
    assert missing(carried.report(reports[0], reports[1], MINE)) == {"a": pytest.approx((15 / 16) ** 10)}
    assert missing(carried.report(reports[1], reports[2], MINE)) == {}


def test_what_ended_or_is_of_others_misses_nothing():
    carried = CarriedBookings()
    assert missing(carried.report(None, report(5, "a", "foreign"), {})) == {}


def test_a_restart_begins_anew():
    carried = CarriedBookings(window_steps=16)
    old = report(500, "a")
    carried.report(None, old, MINE)
    assert missing(carried.report(old, report(1, "a", incarnation="i2"), MINE)) == {"a": 1.0}


def test_a_window_below_one_step_is_refused():
    with pytest.raises(ValueError, match="window_steps must be at least 1, got 0"):
        CarriedBookings(0)
