"""Held KV is released once, by the best id that is known."""

import pytest

from eldr.client import Outcome, WorkerUnreachableError
from eldr.gateway import transfers
from eldr.gateway.bookings import Releases
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import LegError, WorkerRefusalError
from eldr.gateway.transfers import Transfer, WorkerClients
from eldr.rpc.worker_status import WorkerRef
from eldr.testing.fake_services import FakePrefillWorker

WORKER = WorkerRef("p0", "i1", "http://p0", "p0:1")


class Asked:
    """Records what is to be released."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    async def __call__(self, grpc_address, transfer_id, incarnation) -> bool:
        self.calls.append((grpc_address, transfer_id, incarnation))
        return True


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def releases(asked, monkeypatch) -> Releases:
    monkeypatch.setattr(transfers, "UNSEEN_DELAY_S", 0.0)
    return Releases(None, asked, Counts())


async def test_a_release_twice_has_no_second_effect(asked, releases):
    transfer = Transfer(releases, WORKER, "leg-1")
    transfer.answered("t1")
    transfer.release()
    transfer.release()
    await releases.settled()
    assert asked.calls == [("p0:1", "t1", "i1")]
    assert releases.counts[Event.TRANSFER_RELEASED] == 1


async def test_a_transfer_whose_answer_was_never_seen_is_released_under_the_id_of_its_leg(asked, releases):
    Transfer(releases, WORKER, "leg-1").release()
    await releases.settled()
    assert asked.calls == [("p0:1", "leg-1", "i1")]


async def test_a_transfer_that_a_decoder_pulled_is_not_released(asked, releases):
    transfer = Transfer(releases, WORKER, "leg-1")
    transfer.ended()
    transfer.release()
    await releases.settled()
    assert asked.calls == []


@pytest.mark.parametrize(
    ("error", "held"),
    [
        (WorkerRefusalError("p0", 400, b"", "application/json"), False),
        (LegError("p0", "refused the connection", outcome=Outcome.WORKER_ERROR, reached=False), False),
        (LegError("p0", "reset", outcome=Outcome.WORKER_ERROR, reached=True), True),
    ],
)
async def test_only_a_leg_that_reached_its_worker_may_have_left_something_there(asked, releases, error, held):
    transfer = Transfer(releases, WORKER, "leg-1")
    with pytest.raises(type(error)), transfer.ends_unless_reached():
        raise error
    transfer.release()
    await releases.settled()
    assert bool(asked.calls) is held


async def test_channels_to_prefill_workers_are_kept_and_bounded(monkeypatch):
    monkeypatch.setattr(transfers, "MAX_CHANNELS", 1)
    clients = WorkerClients()
    async with FakePrefillWorker("p0") as first, FakePrefillWorker("p1") as second:
        for worker in (first, second, first):
            worker.hand_off("t1")
            assert await clients.release_transfer(worker.address, "t1", worker.info.incarnation)
            assert not await clients.release_transfer(worker.address, "t1", worker.info.incarnation)
        await second.stop()
        with pytest.raises(WorkerUnreachableError):
            await clients.release_transfer(second.address, "t1", "")
    await clients.close()
