"""Fixtures of the gateway's tests."""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from gateway_fleet import Fleet

from eldr.gateway import transfers
from eldr.gateway.settings import GatewaySettings


@pytest.fixture
async def make_fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Fleet]]]:
    """Makes a started fleet; settings of the gateway by name."""
    monkeypatch.setattr(transfers, "UNSEEN_DELAY_S", 0.05)
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            prefills: int = 1,
            decodes: int = 2,
            sampler=None,
            read_counts=None,
            clock=time.monotonic,
            **settings,
        ) -> Fleet:
            fleet = Fleet(prefills, decodes, GatewaySettings(**settings), sampler, read_counts, clock)
            stack.push_async_callback(fleet.stop)
            await fleet.start()
            return fleet

        yield make


@pytest.fixture
async def fleet(make_fleet) -> Fleet:
    """One prefill and two decode engines behind a gateway with default settings."""
    return await make_fleet()
