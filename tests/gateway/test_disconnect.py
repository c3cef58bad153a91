"""Clients that leave: at whatever point, nothing stays booked or held (case 3.1)."""

import asyncio
import contextlib

import pytest

from eldr.client import Outcome
from eldr.gateway.counters import Event

CLIENTS = 100
BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}


async def leave(clients: list[asyncio.Task]) -> None:
    for client in clients:
        client.cancel()
    for client in clients:
        with contextlib.suppress(asyncio.CancelledError):
            await client


def start(fleet, stream: bool) -> list[asyncio.Task]:
    return [
        asyncio.create_task(fleet.stream(BODY) if stream else fleet.complete(BODY)) for _ in range(CLIENTS)
    ]


async def all_given_back(fleet) -> None:
    await fleet.until(lambda: fleet.counts[Event.CLIENT_GONE] == CLIENTS)
    await fleet.settled()
    engines = (*fleet.prefills, *fleet.decodes)
    await fleet.until(lambda: not any(engine.running for engine in engines))
    assert fleet.nothing_is_held()


@pytest.mark.parametrize(
    ("leg", "point", "stream"),
    [
        ("prefill", "accepted", False),
        ("prefill", "prefilled", False),
        ("decode", "accepted", False),
        ("decode", "accepted", True),
        ("decode", "headers", True),
        ("decode", "token", True),
    ],
)
async def test_clients_that_leave_during_a_leg_leave_nothing_behind(fleet, leg, point, stream):
    """Case 3.1: before the answer's head, before the first token, in the middle of the stream."""
    engines = fleet.prefills if leg == "prefill" else fleet.decodes
    pause = fleet.pause(engines, point)
    clients = start(fleet, stream)
    await pause.wait_reached(CLIENTS)
    await leave(clients)
    await all_given_back(fleet)
    assert not fleet.transfers.ended["pulled"] or leg == "decode"
    assert {released[1] for released in fleet.router.released} == {Outcome.CANCELLED}
    assert sum(engine.aborted for engine in engines) == CLIENTS


@pytest.mark.parametrize("call", ["select_prefill", "reserve_decode"])
async def test_clients_that_leave_while_the_router_decides_leave_nothing_behind(fleet, call):
    """Case 3.1: the router has booked, but its answer is still on its way."""
    fleet.router.gates[call] = asyncio.Event()
    clients = start(fleet, stream=False)
    await fleet.until(lambda: fleet.router.waiting[call] == CLIENTS)
    await leave(clients)
    await fleet.until(lambda: fleet.counts[Event.CLIENT_GONE] == CLIENTS)
    fleet.router.gates[call].set()
    await all_given_back(fleet)


async def test_after_all_clients_have_left_new_requests_are_served(fleet):
    pause = fleet.pause(fleet.decodes, "accepted")
    clients = start(fleet, stream=True)
    await pause.wait_reached(CLIENTS)
    await leave(clients)
    pause.go_on()
    answers = await asyncio.gather(*(fleet.complete(BODY) for _ in range(20)))
    assert {status for status, _ in answers} == {200}
    await all_given_back(fleet)
