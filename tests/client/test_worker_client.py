"""The typed client of a worker against fake workers on real ports."""

import asyncio

import grpc
import numpy as np
import pytest

from eldr.client import WorkerClient, WorkerError, WorkerUnreachableError
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature


async def test_either_kind_of_worker_tells_its_info():
    async with FakeDecodeWorker("d0") as decode, FakePrefillWorker("p0") as prefill:
        for worker in (decode, prefill):
            async with WorkerClient(worker.address) as client:
                assert await client.get_info() == worker.info


async def test_a_transfer_is_released_once_and_only_by_its_own_process():
    """Case 2.2: held blocks go to zero at once."""
    async with FakePrefillWorker("p0") as worker, WorkerClient(worker.address) as client:
        worker.hand_off("t1")
        assert (await client.get_prefill_status()).held_transfers == 1
        assert not await client.release_transfer("t1", incarnation="p0-0")
        assert await client.release_transfer("t1", incarnation="p0-1")
        assert not await client.release_transfer("t1")
        assert not await client.release_transfer("never held")
        assert (await client.get_prefill_status()).held_transfers == 0


async def test_signatures_can_be_fetched_and_watched():
    async with FakePrefillWorker("p0") as worker, WorkerClient(worker.address) as client:
        watching = client.watch_signatures()
        event = asyncio.create_task(anext(watching))
        await worker.watched.wait()
        worker.hand_off("t1", fake_signature((3, 4)))
        seen = await event
        assert seen.transfer_id == "t1"
        assert (seen.signature.counts == fake_signature((3, 4)).counts).all()
        assert (await client.get_signature("t1")).tokens == 32
        with pytest.raises(WorkerError, match="no signature of 't2'") as caught:
            await client.get_signature("t2")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
        await watching.aclose()


async def test_kept_decode_counts_can_be_fetched():
    async with FakeDecodeWorker("d0") as worker, WorkerClient(worker.address) as client:
        worker.decode_counts["res-1"] = fake_signature((3, 4))
        assert (await client.get_decode_counts("res-1")).tokens == 32
        with pytest.raises(WorkerError, match="no decode counts of 'res-2'") as caught:
            await client.get_decode_counts("res-2")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_the_state_can_be_read_watched_and_drained():
    async with FakeDecodeWorker("d0") as worker, WorkerClient(worker.address) as client:
        worker.report(running=2, hit_frequency=np.full(FAKE_GEOMETRY.shape, 0.5, np.float32))
        state = await client.get_state()
        assert (state.running, state.hit_frequency.shape) == (2, FAKE_GEOMETRY.shape)
        reports = client.watch_state(period_s=0.05)
        first = await anext(reports)
        second = await anext(reports)
        assert second.sequence > first.sequence
        drained = await client.drain()
        assert (drained.running, drained.waiting) == (2, 0)
        async for state in reports:
            if state.draining:
                break
        await client.drain(False)
        assert not (await client.get_state()).draining
        await reports.aclose()


async def test_calls_that_are_never_answered_have_a_deadline():
    """Case 4.10."""
    async with FakeDecodeWorker("d0") as worker, WorkerClient(worker.address, timeout_s=0.2) as client:
        worker.hang |= {"GetInfo", "GetState", "Drain"}
        for call in (client.get_info(), client.get_state(), client.drain()):
            with pytest.raises(WorkerError) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_worker_that_is_down_is_unreachable():
    async with FakeDecodeWorker("d0") as worker:
        address = worker.address
    async with WorkerClient(address, timeout_s=2.0) as client:
        with pytest.raises(WorkerUnreachableError, match=f"worker {address}"):
            await client.get_info()


def test_an_empty_address_is_refused():
    with pytest.raises(ValueError, match="host:port"):
        WorkerClient("")
