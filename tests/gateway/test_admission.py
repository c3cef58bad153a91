"""Turns, queues and shares of tenants."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from eldr.gateway.admission import Admission, AdmissionLimits
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import GatewayError


def admission(
    running=2, waiting=3, tenant_running=100, tenant_waiting=100, wait_s=5.0
) -> tuple[Admission, Counts]:
    counts = Counts()
    return Admission(
        AdmissionLimits(running, waiting, tenant_running, tenant_waiting, wait_s), counts
    ), counts


class Client:
    """A request that stays in its turn until it is told to leave."""

    def __init__(self, admission: Admission, tenant: str = "a") -> None:
        self.tenant = tenant
        self.begun = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.turn(self.tenant):
            self.begun.set()
            await self.leave.wait()


async def idle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_beyond_the_room_wait_and_start_in_order():
    turns, counts = admission()
    clients = [Client(turns) for _ in range(4)]
    await idle()
    assert [client.begun.is_set() for client in clients] == [True, True, False, False]
    assert (turns.running, turns.waiting, counts[Event.REQUEST_QUEUED]) == (2, 2, 2)
    clients[1].leave.set()
    await idle()
    assert [client.begun.is_set() for client in clients] == [True, True, True, False]
    for client in clients:
        client.leave.set()
    await asyncio.gather(*(client.task for client in clients))
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_full_queue_is_a_429_with_retry_after():
    turns, counts = admission(running=1, waiting=1)
    clients = [Client(turns) for _ in range(2)]
    await idle()
    with pytest.raises(GatewayError) as refusal:
        async with turns.turn("b"):
            pass
    assert (refusal.value.status, refusal.value.retry_after_s > 0) == (429, True)
    assert counts[Event.REQUEST_SHED] == 1
    for client in clients:
        client.task.cancel()


async def test_a_tenant_at_its_limit_waits_while_another_one_runs():
    turns, _ = admission(running=10, tenant_running=1, tenant_waiting=1)
    first, second = Client(turns), Client(turns)
    other = Client(turns, "b")
    await idle()
    assert (first.begun.is_set(), second.begun.is_set(), other.begun.is_set()) == (True, False, True)
    with pytest.raises(GatewayError, match="one client"):
        async with turns.turn("a"):
            pass
    first.leave.set()
    await idle()
    assert second.begun.is_set()
    for client in (second, other):
        client.task.cancel()


async def test_a_flood_of_one_tenant_delays_another_by_one_request():
    turns, _ = admission(running=1, waiting=100)
    flood = [Client(turns) for _ in range(20)]
    await idle()
    other = Client(turns, "b")
    await idle()
    for client in flood[:2]:
        client.leave.set()
        await idle()
    assert other.begun.is_set()
    for client in (*flood, other):
        client.task.cancel()


async def test_a_wait_ends_with_a_429_at_its_limit():
    turns, _ = admission(running=1, wait_s=0.02)
    client = Client(turns)
    await idle()
    with pytest.raises(GatewayError, match=r"no turn within 0\.02 s"):
        async with turns.turn("b"):
            pass
    with pytest.raises(GatewayError, match=r"no turn within 0\.01 s"):
        async with turns.turn("b", within_s=0.01):
            pass
    assert turns.waiting == 0
    client.leave.set()
    await client.task
    assert turns.running == 0


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind():
    turns, _ = admission(running=1)
    runs, waits, last = Client(turns), Client(turns), Client(turns)
    await idle()
    waits.task.cancel()
    await idle()
    assert turns.waiting == 1
    runs.leave.set()
    await idle()
    assert last.begun.is_set()
    last.leave.set()
    await last.task
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_client_that_leaves_as_a_turn_becomes_free_is_passed_over():
    turns, _ = admission(running=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a"))
        leaves, next_one = Client(turns), Client(turns)
        await idle()
        leaves.task.cancel()
    await idle()
    assert next_one.begun.is_set()
    next_one.leave.set()
    await next_one.task
    assert (turns.running, turns.waiting) == (0, 0)


async def test_a_turn_given_to_a_client_that_leaves_at_the_same_moment_goes_on():
    turns, _ = admission(running=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a"))
        leaves, next_one = Client(turns), Client(turns)
        await idle()
    leaves.task.cancel()
    await idle()
    assert next_one.begun.is_set()
    next_one.leave.set()
    await next_one.task
    assert (turns.running, turns.waiting) == (0, 0)
