"""Arithmetic and inputs of the gateway's part of the load benchmark."""

import pytest

from eldr.rpc.codec import signature_from_text
from integration.bench._gateway_load import added_ms, fleet_of, signature_text


def test_what_is_added_is_the_difference_of_the_percentiles():
    direct = [0.001 * step for step in range(1, 102)]
    through = [seconds + 0.002 for seconds in direct]
    assert added_ms(direct, through) == {"p50": pytest.approx(2.0), "p99": pytest.approx(2.0)}


def test_the_signature_counts_every_token_in_every_layer():
    signature = signature_from_text(signature_text(layers=3, experts=16, top_k=2, tokens=10))
    assert signature.counts.sum(axis=1).tolist() == [20, 20, 20]


async def test_a_fleet_serves_a_stream_and_keeps_no_booking():
    async with fleet_of(1, 1) as fleet:
        assert await fleet.stream(1) == "done"
        assert await fleet.bookings() in (0, 1)
