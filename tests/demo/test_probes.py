"""Engines are read: metrics text, totals, and signatures as they complete."""

import asyncio

import grpc
import numpy as np
import pytest

from eldr.client import DecoderState, DecoderTotals, ExpertSignature, SignatureEvent, WorkerError
from eldr.demo import probes
from eldr.demo.measure import Meter

TEXT = """# HELP vllm:prefix_cache_hits_total Prefix cache hits.
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 96.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 4.0
vllm:prefix_cache_hits_total_created{engine="0"} 1.7e9
vllm:other_total 5
"""


def test_a_metric_is_summed_over_its_labels_and_no_other_name_is_taken():
    assert probes.metric(TEXT, "vllm:prefix_cache_hits_total") == 100.0
    assert probes.metric(TEXT, "vllm:other_total") == 5.0
    assert probes.metric(TEXT, "vllm:missing_total") == 0.0


class Decoder:
    def __init__(self, tokens, union):
        self._totals = DecoderTotals(decode_tokens=tokens, union_tokens=union)

    async def get_state(self):
        return DecoderState("d", "i", 1, totals=self._totals)


async def test_totals_are_summed_over_the_decoders():
    decoders = [Decoder(3, 30.0), Decoder(5, 20.0)]
    assert await probes.read_totals(decoders, 1.5) == Meter(8, 50.0, 1.5)


class Prefill:
    def __init__(self, *events):
        self._events = events
        self.closed = False

    async def watch_signatures(self):
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield event
        await asyncio.Event().wait()

    async def close(self):
        self.closed = True


def event(count, dropped=0):
    counts = np.array([[count, 0]], dtype=np.uint32)
    return SignatureEvent("t", ExpertSignature("f", 1, count, count, counts), dropped)


def log_of(monkeypatch, **workers):
    monkeypatch.setattr(probes, "WorkerClient", workers.__getitem__)
    return probes.SignatureLog(list(workers))


async def test_signatures_of_all_workers_are_collected_once(monkeypatch):
    workers = {"a": Prefill(event(1), event(2, dropped=3)), "b": Prefill(event(4))}
    async with log_of(monkeypatch, **workers) as log:
        taken = await log.settle(3)
        assert sorted(int(counts[0, 0]) for counts in taken) == [1, 2, 4]
        assert log.dropped == 3
        assert log.counts == []
    assert all(worker.closed for worker in workers.values())


async def test_fewer_signatures_than_expected_are_given_after_the_limit(monkeypatch):
    monkeypatch.setattr(probes, "SETTLE_S", 0.05)
    async with log_of(monkeypatch, a=Prefill(event(1))) as log:
        assert len(await log.settle(2)) == 1


async def test_a_watch_that_breaks_is_raised(monkeypatch):
    broken = WorkerError(grpc.StatusCode.UNAVAILABLE, "gone")
    async with log_of(monkeypatch, a=Prefill(event(1), broken)) as log:
        await log.settle(1)
        with pytest.raises(WorkerError, match="gone"):
            await log.settle(1)
