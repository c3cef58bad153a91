"""The watch alone: when a worker is asked, and what its silence ends."""

import asyncio

import pytest

from eldr.client import WorkerRef
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerLostError
from eldr.gateway.watch import Watch
from eldr.rpc.outcome import Outcome
from eldr.testing.clock import FakeClock

D0 = WorkerRef("d0", "i1", "http://d0", "d0:1")
D1 = WorkerRef("d1", "i1", "http://d1", "d1:1")


class Probe:
    """A health check that the test answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: asyncio.Queue[bool] = asyncio.Queue()

    async def __call__(self, worker: WorkerRef) -> bool:
        self.asked.append(worker.worker_id)
        return await self.answers.get()


async def wait_for(watch: Watch, worker: WorkerRef) -> None:
    async with watch.limit(worker, 60.0, "the leg"):
        await asyncio.Event().wait()


async def idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def test_one_question_at_a_time_whatever_waits(clock):
    """Case 7.6."""
    probe = Probe()
    watch = Watch(probe, 10.0, Counts(), clock)
    waits = [asyncio.create_task(wait_for(watch, D0)) for _ in range(50)]
    await idle()
    for _ in range(20):
        clock.advance(10.0)
        watch.look()
        await idle()
    assert probe.asked == ["d0"]
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await probe.answers.put(True)
    await idle()
    assert not watch._watched, "nothing is kept of a worker that nobody waits for"


async def test_two_questions_without_an_answer_end_the_silent_waits_of_that_worker_alone(clock):
    asked, counts = [], Counts()

    async def alive(worker: WorkerRef) -> bool:
        asked.append(worker.worker_id)
        return worker == D1

    watch = Watch(alive, 10.0, counts, clock)
    lost, other = (asyncio.create_task(wait_for(watch, worker)) for worker in (D0, D1))
    await idle()
    clock.advance(10.0)
    young = asyncio.create_task(wait_for(watch, D0))
    await idle()
    watch.look()
    await idle()
    assert not lost.done(), "one question may go unanswered"
    watch.look()
    with pytest.raises(WorkerLostError, match="health check"):
        await asyncio.wait_for(lost, 10)
    assert not other.done()
    assert not young.done(), "it has not been silent for long enough"
    assert (asked.count("d0"), counts[Event.WORKER_LOST]) == (2, 1)
    for wait in (other, young):
        wait.cancel()


async def test_a_limit_that_is_over_is_a_timeout_and_not_a_lost_worker(clock):
    watch = Watch(Probe(), 10.0, Counts(), clock)
    with pytest.raises(LegError, match=r"the leg took longer than 0\.01 s") as failure:
        async with watch.limit(D0, 0.01, "the leg"):
            await asyncio.Event().wait()
    assert not isinstance(failure.value, WorkerLostError)
    assert (failure.value.outcome, failure.value.retryable) == (Outcome.TIMEOUT, False)
    assert not watch._watched
