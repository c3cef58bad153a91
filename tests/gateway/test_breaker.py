"""The breaker alone, on a clock that moves when told."""

import pytest

from eldr.gateway.breaker import MAX_WORKERS, Breakers, Fault
from eldr.rpc.worker_info import WorkerRole
from eldr.testing.clock import FakeClock

DECODE = WorkerRole.DECODE


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breakers(clock: FakeClock) -> Breakers:
    return Breakers(failures=3, open_s=5.0, clock=clock)


def fail(breakers: Breakers, fault: Fault = Fault.SILENT, worker: str = "d0", times: int = 1) -> bool:
    opened = False
    for _ in range(times):
        ticket = breakers.admit(worker, "i1", DECODE)
        assert ticket is not None
        opened = ticket.failed(fault)
    return opened


def succeed(breakers: Breakers, worker: str = "d0") -> None:
    ticket = breakers.admit(worker, "i1", DECODE)
    assert ticket is not None
    ticket.succeeded()


def test_it_opens_after_failures_in_a_row(breakers):
    fail(breakers, Fault.SILENT, times=2)
    assert breakers.excluded() == set()
    assert fail(breakers, Fault.SILENT)
    assert breakers.excluded() == {"d0"}
    assert not breakers.admit("d0", "i1", DECODE)


def test_a_worker_that_is_gone_opens_it_at_once(breakers):
    assert fail(breakers, Fault.GONE)
    assert breakers.excluded() == {"d0"}


def test_a_success_between_failures_starts_the_count_anew(breakers):
    fail(breakers, Fault.SILENT, times=2)
    succeed(breakers)
    fail(breakers, Fault.SILENT, times=2)
    assert breakers.excluded() == set()


def test_what_says_nothing_about_the_worker_neither_opens_nor_closes(breakers, clock):
    """Cases 3.12 and 3.13: in a half-open breaker too."""
    fail(breakers, Fault.NONE, times=20)
    assert breakers.excluded() == set()
    fail(breakers, times=3)
    clock.advance(5.0)
    fail(breakers, Fault.NONE)
    assert breakers.admit("d0", "i1", DECODE) is not None
    assert breakers.excluded() == {"d0"}, "still half-open: one probe at a time"


def test_one_probe_at_a_time_and_a_success_closes(breakers, clock):
    fail(breakers, times=3)
    clock.advance(4.9)
    assert breakers.excluded() == {"d0"}
    clock.advance(0.1)
    assert breakers.excluded() == set()
    probe = breakers.admit("d0", "i1", DECODE)
    assert probe is not None
    assert breakers.admit("d0", "i1", DECODE) is None
    probe.succeeded()
    assert breakers.admit("d0", "i1", DECODE) is not None
    assert breakers.admit("d0", "i1", DECODE) is not None


def test_a_probe_that_is_given_up_lets_the_next_one_go(breakers, clock):
    fail(breakers, times=3)
    clock.advance(5.0)
    probe = breakers.admit("d0", "i1", DECODE)
    assert probe is not None
    probe.close()
    probe.close()
    assert breakers.admit("d0", "i1", DECODE) is not None


def test_each_failed_probe_doubles_the_wait_up_to_a_limit(breakers, clock):
    fail(breakers, Fault.SILENT, times=3)
    for open_s in (5.0, 10.0, 20.0, 40.0, 40.0):
        clock.advance(open_s - 0.1)
        assert breakers.excluded() == {"d0"}
        clock.advance(0.1)
        fail(breakers, Fault.SILENT)


def test_failures_of_legs_that_were_there_before_it_opened_do_not_prolong_it(breakers, clock):
    tickets = [breakers.admit("d0", "i1", DECODE) for _ in range(6)]
    for ticket in tickets[:5]:
        ticket.failed(Fault.SILENT)
    clock.advance(5.0)
    assert breakers.excluded() == set()
    assert breakers.admit("d0", "i1", DECODE) is not None
    assert not tickets[5].failed(Fault.SILENT)
    assert breakers.excluded() == {"d0"}, "the probe is still out"


def test_answered_errors_open_breakers_of_at_most_half_the_workers(breakers):
    """A client whose requests all end in a 500 must not take the fleet out, nor a broken worker draw it."""
    for worker in ("d0", "d1", "d2", "d3"):
        succeed(breakers, worker)
    for worker in ("d0", "d1", "d2", "d3"):
        fail(breakers, Fault.ANSWERED, worker=worker, times=3)
    assert breakers.excluded() == {"d0", "d1"}


def test_the_only_worker_is_never_closed_off_for_answered_errors(breakers):
    fail(breakers, Fault.ANSWERED, times=50)
    assert breakers.excluded() == set()


def test_a_new_incarnation_begins_closed_and_late_news_of_the_old_one_is_nothing(breakers):
    late = breakers.admit("d0", "i1", DECODE)
    fail(breakers, times=3)
    assert breakers.admit("d0", "i2", DECODE) is not None
    late.failed(Fault.SILENT)
    assert breakers.excluded() == set()


def test_what_is_remembered_is_bounded(breakers):
    for index in range(MAX_WORKERS + 10):
        fail(breakers, Fault.SILENT, worker=f"d{index}", times=3)
    assert len(breakers.excluded()) == MAX_WORKERS
