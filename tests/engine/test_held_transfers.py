"""Which pulls of a hand-off's KV were in time."""

import pytest

from eldr.engine.held_transfers import HeldTransfers


def held(*names: str, remembered: int = 4) -> HeldTransfers:
    transfers = HeldTransfers(remembered)
    for name in names:
        transfers.hold(name)
    return transfers


def test_kv_that_is_still_held_was_held_when_it_was_pulled() -> None:
    assert held("a").confirm("a", "d0")


def test_kv_that_was_read_is_confirmed_to_its_reader_again_and_again() -> None:
    transfers = held("a")
    transfers.end({"a"}, ())
    assert transfers.confirm("a", "d0")
    assert transfers.confirm("a", "d0")


def test_kv_whose_lease_ended_is_never_confirmed() -> None:
    """Case 2.1."""
    transfers = held("a")
    transfers.end({"a"}, {"a"})
    assert not transfers.confirm("a", "d0")


def test_a_rank_that_gave_up_earlier_than_the_last_one_was_read_ends_the_transfer_as_expired() -> None:
    transfers = held("a")
    transfers.end((), {"a"})
    assert not transfers.confirm("a", "d0")
    transfers.end({"a"}, ())
    assert not transfers.confirm("a", "d0")
    assert not transfers._expired


@pytest.mark.parametrize("over", [False, True])
def test_a_hand_off_has_one_reader(over: bool) -> None:
    transfers = held("a")
    assert transfers.confirm("a", "d0")
    if over:
        transfers.end({"a"}, ())
    assert not transfers.confirm("a", "d1")
    assert transfers.confirm("a", "d0")


def test_an_unknown_transfer_is_not_confirmed() -> None:
    assert not held().confirm("a", "d0")


def test_a_released_lease_does_not_concern_the_next_holder_of_the_id() -> None:
    transfers = held("a")
    transfers.end({"a"}, {"a"})
    transfers.hold("a")
    assert transfers.confirm("a", "d1")


def test_an_expired_one_among_live_ones_ends_alone() -> None:
    """Case 2.28: A renewed, B and C expired, in whatever order they were held."""
    transfers = held("a", "b", "c")
    transfers.end({"c", "b"}, {"b", "c"})
    assert (len(transfers), "a" in transfers) == (1, True)
    assert [transfers.confirm(name, "d") for name in "abc"] == [True, False, False]


def test_what_was_read_is_remembered_for_a_bounded_number() -> None:
    transfers = held(*map(str, range(10)), remembered=3)
    for number in range(10):
        transfers.end({str(number)}, ())
    assert [transfers.confirm(str(number), "d") for number in range(10)] == [False] * 7 + [True] * 3
    assert len(transfers._read) == 3
