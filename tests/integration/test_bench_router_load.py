import asyncio

import grpc.aio
import pytest

from eldr.client.worker_client import WorkerClient
from eldr.rpc.codec import decode_signature
from eldr.v1 import signature_pb2
from integration.bench._decoder_fleet import GEOMETRY, start_decoders
from integration.bench.router_load import signatures, summary_ms


def test_quantiles_are_in_milliseconds():
    assert summary_ms([0.001] * 98 + [0.005] * 2) == {"p50": 1.0, "p99": 5.0}


def test_signatures_are_what_a_router_accepts():
    for packed in signatures(2, tokens=5):
        signature = decode_signature(signature_pb2.ExpertSignature.FromString(packed))
        signature.require_geometry(GEOMETRY)
        assert (signature.tokens, signature.coverage) == (5, 1.0)


async def test_fake_decoders_report_what_they_carry():
    decoders = await start_decoders(2, 0.01)
    decoders[1].carried.add("r0")
    async with WorkerClient(decoders[1].address) as client:
        assert (await client.get_info()).worker_id == "d001"
        reports = client.watch_state()
        first, second = await anext(reports), await anext(reports)
        assert first.reservation_ids == {"r0"}
        assert (second.sequence, second.hit_frequency.shape) == (2, GEOMETRY.shape)
        await reports.aclose()
    await asyncio.gather(*(decoder.stop() for decoder in decoders))
    with pytest.raises(grpc.aio.AioRpcError):
        async with grpc.aio.insecure_channel(decoders[0].address) as channel:
            await channel.unary_unary("/eldr.v1.DecodeService/GetInfo")(b"", timeout=1)
