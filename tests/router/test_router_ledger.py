import pytest
from hypothesis import given
from hypothesis import strategies as st

from eldr.router.ledger import LEFT_S, AlreadyReleasedError, Ledger
from eldr.routing.contract import Booking


def booking(reservation_id):
    return Booking(reservation_id, None)


@pytest.fixture
def ledger():
    return Ledger(ttl_s=10.0, remember_s=60.0)


def test_one_scan_ends_every_expired_booking_whatever_the_order(ledger):
    """Case 2.28: A was renewed and stands first, B and C behind it are over."""
    for name in "ABC":
        ledger.reserve("d0", booking(name), "", now_s=0.0)
    ledger.carry("d0", frozenset({"A"}), now_s=8.0)
    assert {entry.booking.reservation_id for entry in ledger.expire(now_s=11.0)} == {"B", "C"}
    assert list(ledger.bookings("d0")) == ["A"]


def test_a_booking_that_reports_carry_does_not_expire(ledger):
    ledger.reserve("d0", booking("A"), "", now_s=0.0)
    for now_s in range(0, 100, 5):
        ledger.carry("d0", frozenset({"A", "of another router"}), now_s)
        assert ledger.expire(now_s) == []
    assert [entry.booking.reservation_id for entry in ledger.expire(105.1)] == ["A"]


def test_a_booking_that_its_worker_no_longer_reports_ends_soon(ledger):
    """A gateway that died while its request was running: the engine's reports say when it is over."""
    ledger.reserve("d0", booking("A"), "", now_s=0.0)
    ledger.carry("d0", frozenset(), now_s=1.0)
    ledger.carry("d0", frozenset({"A"}), now_s=2.0)
    ledger.carry("d0", frozenset(), now_s=5.0)
    ledger.carry("d0", frozenset(), now_s=5.5)
    assert ledger.expire(5.0 + LEFT_S - 0.1) == []
    assert [entry.booking.reservation_id for entry in ledger.expire(5.0 + LEFT_S)] == ["A"]


def test_a_booking_that_comes_back_into_the_reports_is_renewed(ledger):
    ledger.reserve("d0", booking("A"), "", now_s=0.0)
    for now_s, named in ((1.0, {"A"}), (2.0, set()), (3.0, {"A"})):
        ledger.carry("d0", frozenset(named), now_s)
    assert ledger.expire(12.9) == []


def test_only_the_booked_worker_carries_a_booking(ledger):
    ledger.reserve("d0", booking("A"), "", now_s=0.0)
    ledger.carry("d1", frozenset({"A"}), now_s=9.0)
    assert len(ledger.expire(now_s=10.0)) == 1


def test_a_release_twice_has_no_second_effect(ledger):
    ledger.reserve("d0", booking("A"), "", now_s=0.0)
    assert ledger.release("A", now_s=1.0) is not None
    assert ledger.release("A", now_s=1.0) is None
    assert len(ledger) == 0
    assert not ledger.bookings("d0")


def test_a_booking_after_its_own_release_is_refused_for_a_while(ledger):
    ledger.release("A", now_s=0.0)
    with pytest.raises(AlreadyReleasedError, match="A was already released"):
        ledger.find("A", now_s=59.0)
    assert ledger.find("A", now_s=61.0) is None


def test_released_ids_are_forgotten_in_their_time_also_where_one_was_released_again(ledger):
    """Case 2.28 for the second table: A stands first when it is released again, B behind it is over."""
    ledger.release("A", now_s=0.0)
    ledger.release("B", now_s=1.0)
    ledger.release("A", now_s=30.0)
    ledger.expire(now_s=61.0)
    assert ledger.remembered == 1
    with pytest.raises(AlreadyReleasedError):
        ledger.find("A", now_s=61.0)
    ledger.expire(now_s=90.0)
    assert ledger.remembered == 0


def test_what_is_remembered_is_bounded(ledger):
    ledger.MAX_REMEMBERED = 10
    for i in range(100):
        ledger.release(f"r{i}", now_s=float(i) / 100)
    assert ledger.remembered == 10
    ledger.expire(now_s=1000.0)
    assert ledger.remembered == 0


def test_the_same_id_is_never_booked_twice(ledger):
    ledger.reserve("d0", booking("A"), "first", now_s=0.0)
    with pytest.raises(ValueError, match="A is booked already"):
        ledger.reserve("d1", booking("A"), "second", now_s=0.0)
    assert ledger.find("A", now_s=0.0).answer == "first"


def test_a_worker_takes_its_bookings_with_it(ledger):
    for name in "AB":
        ledger.reserve("d0", booking(name), "", now_s=0.0)
    ledger.reserve("d1", booking("C"), "", now_s=0.0)
    assert ledger.drop_worker("d0") == 2
    assert list(ledger.bookings("d1")) == ["C"]
    assert len(ledger) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "carry", "expire", "drop"]),
            st.sampled_from(["d0", "d1"]),
            st.integers(0, 6),
        ),
        max_size=40,
    )
)
def test_every_table_is_empty_once_everything_ended(actions):
    """Cases 3.1 and 3.3: whatever the order of events, loads return to zero and no entry stays."""
    ledger, now_s = Ledger(ttl_s=3.0, remember_s=5.0), 0.0
    for action, worker_id, number in actions:
        now_s += 0.5
        name = f"r{number}"
        if action == "reserve":
            try:
                if ledger.find(name, now_s) is None:
                    ledger.reserve(worker_id, booking(name), "", now_s)
            except AlreadyReleasedError:
                pass
        elif action == "release":
            ledger.release(name, now_s)
        elif action == "carry":
            ledger.carry(worker_id, frozenset({name}), now_s)
        elif action == "expire":
            ledger.expire(now_s)
        else:
            ledger.drop_worker(worker_id)
        assert len(ledger) == len(ledger.bookings("d0")) + len(ledger.bookings("d1"))
    ledger.expire(now_s + 100.0)
    assert len(ledger) == 0
    assert ledger.remembered == 0
    assert vars(ledger)["_by_worker"] == {}
