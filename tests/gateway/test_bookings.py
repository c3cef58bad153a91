"""Releases run to their end, once, and after the answer that they wait for."""

import asyncio

import grpc
import pytest

from eldr.client import NoWorkerError, Outcome, RouterUnreachableError
from eldr.gateway import bookings
from eldr.gateway.bookings import PrefillBooking, Releases
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerRefusalError
from eldr.gateway.legs import ReplyError
from eldr.gateway.transfers import WorkerClients

UNREACHABLE = RouterUnreachableError(grpc.StatusCode.UNAVAILABLE, "connection refused")


class Router:
    """Only what a prefill booking calls."""

    def __init__(self) -> None:
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self.failures: list[Exception] = []
        self.released: list[Outcome] = []

    async def select_prefill(self, **query):
        return await self.answer

    async def release_prefill(self, reservation_id, outcome) -> bool:
        if self.failures:
            raise self.failures.pop()
        self.released.append(outcome)
        return True


@pytest.fixture
async def router() -> Router:
    return Router()


@pytest.fixture
def releases(router, monkeypatch) -> Releases:
    monkeypatch.setattr(bookings, "RETRY_DELAYS_S", (0.0, 0.0))
    return Releases(router, WorkerClients().release_transfer, Counts())


async def booked(router: Router, releases: Releases) -> PrefillBooking:
    booking = PrefillBooking(releases)
    router.answer.set_result("reservation")
    await booking.reserve("m", b"", [])
    return booking


async def test_a_release_twice_has_no_second_effect(router, releases):
    booking = await booked(router, releases)
    booking.release()
    booking.release()
    await releases.settled()
    assert router.released == [Outcome.CANCELLED]


async def test_a_booking_that_the_router_ended_is_not_released(router, releases):
    booking = await booked(router, releases)
    booking.ended()
    booking.release()
    await releases.settled()
    assert router.released == []


async def test_a_cancelled_reservation_is_released_after_the_router_has_answered(router, releases):
    booking = PrefillBooking(releases)
    client = asyncio.ensure_future(booking.reserve("m", b"", []))
    await asyncio.sleep(0)
    client.cancel()
    await asyncio.wait([client])
    booking.release()
    await asyncio.sleep(0)
    assert router.released == []
    router.answer.set_result("reservation")
    await releases.settled()
    assert router.released == [Outcome.CANCELLED]


async def test_a_booking_that_never_was_is_not_released(router, releases):
    PrefillBooking(releases).release()
    booking = PrefillBooking(releases)
    router.answer.set_exception(NoWorkerError(grpc.StatusCode.UNAVAILABLE, "none"))
    with pytest.raises(NoWorkerError):
        await booking.reserve("m", b"", [])
    booking.release()
    await releases.settled()
    assert router.released == []


async def test_a_reservation_without_an_answer_may_have_been_made_and_is_released(router, releases):
    booking = PrefillBooking(releases)
    router.answer.set_exception(UNREACHABLE)
    with pytest.raises(RouterUnreachableError):
        await booking.reserve("m", b"", [])
    booking.release()
    await releases.settled()
    assert router.released == [Outcome.CANCELLED]


@pytest.mark.parametrize(("failures", "done"), [(2, True), (3, False)])
async def test_a_release_is_tried_three_times(router, releases, failures, done):
    booking = await booked(router, releases)
    router.failures = [UNREACHABLE] * failures
    booking.release()
    await releases.settled()
    assert bool(router.released) is done
    assert releases.counts[Event.RELEASE_FAILED] == (not done)


@pytest.mark.parametrize(
    ("error", "left", "outcome"),
    [
        (LegError("p0", "silent", outcome=Outcome.TIMEOUT), LegError, Outcome.TIMEOUT),
        (WorkerRefusalError("p0", 400, b"{}", "application/json"), WorkerRefusalError, Outcome.CLIENT_ERROR),
        (ReplyError("no choices"), LegError, Outcome.WORKER_ERROR),
    ],
)
async def test_a_failed_leg_gives_its_booking_back_with_the_outcome_that_fits(
    router, releases, error, left, outcome
):
    booking = await booked(router, releases)
    with pytest.raises(left, match="p0"), booking.ends_with_the_leg("p0"):
        raise error
    await releases.settled()
    assert router.released == [outcome]
