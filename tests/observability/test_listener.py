"""`/metrics` over HTTP."""

import asyncio
import urllib.request

import pytest

from eldr.observability.listener import MetricsListener
from eldr.observability.series import Catalogue, Kind, Sample, Series

CATALOGUE = Catalogue(Series("eldr_b", Kind.GAUGE, "Now."))


def fetched(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


async def test_a_scrape_reads_on_the_loop_that_owns_the_values() -> None:
    loops = []

    def read() -> list[Sample]:
        loops.append(asyncio.get_running_loop())
        return [Sample("eldr_b", 7)]

    listener = MetricsListener("127.0.0.1", 0, CATALOGUE, read)
    try:
        assert "\neldr_b 7.0\n" in await asyncio.to_thread(fetched, listener.port)
    finally:
        await listener.close()
    assert loops == [asyncio.get_running_loop()]


async def test_an_address_that_is_taken_is_an_os_error() -> None:
    listener = MetricsListener("127.0.0.1", 0, CATALOGUE, list)
    try:
        with pytest.raises(OSError, match="in use"):
            MetricsListener("127.0.0.1", listener.port, CATALOGUE, list)
    finally:
        await listener.close()
