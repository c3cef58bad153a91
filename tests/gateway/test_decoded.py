"""Decode counts of a share of the requests travel with their release, off the request path."""

import asyncio

import grpc
import pytest

from eldr.client import CodecError, Outcome, WorkerError
from eldr.gateway import decoded
from eldr.gateway.counters import Counts, Event
from eldr.gateway.decoded import DecodedCounts
from eldr.gateway.sampling import KEEP_COUNTS
from eldr.testing.signatures import fake_signature

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}
NOT_FOUND = WorkerError(grpc.StatusCode.NOT_FOUND, "no decode counts of 'r'")


class Decoder:
    """Answers a question with the next of `answers`; `asked` are the reservations asked for."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, grpc_address, reservation_id):
        self.asked.append((grpc_address, reservation_id))
        answer = self.answers.pop(0) if self.answers else NOT_FOUND
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(decoded, "RETRY_DELAYS_S", (0.0, 0.0))


@pytest.mark.parametrize(
    ("answers", "found", "event"),
    [
        ([fake_signature()], True, Event.DECODED_SENT),
        ([NOT_FOUND, fake_signature()], True, Event.DECODED_SENT),
        ([NOT_FOUND, NOT_FOUND], False, Event.DECODED_MISSING),
        ([CodecError("layer 0 sums to 3")], False, Event.DECODED_REFUSED),
        ([asyncio.Event()], False, Event.DECODED_MISSING),
    ],
)
async def test_counts_are_read_or_their_absence_is_counted(answers, found, event):
    counts = Counts()
    reader = DecodedCounts(1.0, Decoder(*answers), counts, limit_s=0.05)
    assert (await reader.read("d0:1", "r") is not None) is found
    assert counts == {event: 1}


def test_the_share_of_the_requests_is_drawn():
    draws = iter([0.0, 0.09, 0.1, 0.9])
    reader = DecodedCounts(0.1, Decoder(), Counts(), draw=lambda: next(draws))
    assert [reader.wanted() for _ in range(4)] == [True, True, False, False]
    assert not DecodedCounts(0.0, Decoder(), Counts(), draw=lambda: 0.0).wanted()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_release_brings_what_the_decoder_counted(make_fleet, stream):
    decoder = Decoder(fake_signature())
    fleet = await make_fleet(read_counts=decoder, learn_share=1.0)
    for engine in fleet.prefills:
        engine.signature = lambda rendered: "signature"
    async with fleet.post("/v1/completions", {**BODY, "stream": stream}) as response:
        assert b"eldr" not in (await response.read()).replace(b"cmpl-eldr-", b"")
    await fleet.settled()
    kept = fleet.sent_to(fleet.decodes)[0]["kv_transfer_params"]
    assert KEEP_COUNTS.items() <= kept.items()
    assert decoder.asked == [("grpc-of-d0", kept["eldr_reservation_id"])]
    assert [found.covered_tokens for found in fleet.router.decoded] == [32]
    assert fleet.router.released == [("decode", Outcome.COMPLETED, 5)]
    assert fleet.nothing_is_held()


async def test_without_the_option_nothing_is_kept_and_nobody_is_asked(make_fleet):
    decoder = Decoder()
    fleet = await make_fleet(read_counts=decoder)
    for engine in fleet.prefills:
        engine.signature = lambda rendered: "signature"
    await fleet.complete(BODY)
    await fleet.settled()
    assert not KEEP_COUNTS.keys() & fleet.sent_to(fleet.decodes)[0]["kv_transfer_params"].keys()
    assert (decoder.asked, fleet.router.decoded) == ([], [None])


async def test_the_client_does_not_wait_for_a_decoder_that_is_slow_to_tell(make_fleet):
    told = asyncio.Event()
    fleet = await make_fleet(read_counts=Decoder(told), learn_share=1.0)
    for engine in fleet.prefills:
        engine.signature = lambda rendered: "signature"
    status, _ = await fleet.complete(BODY)
    assert status == 200
    assert fleet.router.released == []
    told.set()
    await fleet.settled()
    assert fleet.router.released == [("decode", Outcome.COMPLETED, 5)]


async def test_a_release_without_counts_is_a_release(make_fleet):
    fleet = await make_fleet(read_counts=Decoder(NOT_FOUND, NOT_FOUND), learn_share=1.0)
    for engine in fleet.prefills:
        engine.signature = lambda rendered: "signature"
    await fleet.complete(BODY)
    await fleet.settled()
    assert fleet.router.decoded == [None]
    assert fleet.counts[Event.DECODED_MISSING] == 1
    assert fleet.nothing_is_held()


async def test_a_request_without_a_signature_teaches_nothing(make_fleet):
    decoder = Decoder(fake_signature())
    fleet = await make_fleet(read_counts=decoder, learn_share=1.0)
    await fleet.complete(BODY)
    await fleet.settled()
    assert (decoder.asked, fleet.router.decoded) == ([], [None])
