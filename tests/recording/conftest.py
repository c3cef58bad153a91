"""A fake worker that serves both legs."""

import pytest
from aiohttp.test_utils import TestServer
from fake_two_leg_worker import FakeWorker


@pytest.fixture
async def worker():
    fake = FakeWorker()
    async with TestServer(fake.app()) as server:
        fake.url = str(server.make_url("")).rstrip("/")
        yield fake
