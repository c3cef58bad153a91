"""Decode counts that come with releases reach the predictor; bad ones are counted by name and change nothing."""

import contextlib

import numpy as np
import pytest
from router_rig import CoreRig, raw_channel, served, until

from eldr.client import Outcome
from eldr.gateway.counters import Counts, Event
from eldr.gateway.decoded import DecodedCounts
from eldr.gateway.transfers import WorkerClients
from eldr.router.signatures import ReadSignature
from eldr.routing.contract import DecodeRequest
from eldr.routing.predictor import PLAIN
from eldr.rpc.codec import encode_signature
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.fake_services import FakeDecodeWorker, fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature
from eldr.v1 import routing_pb2, routing_pb2_grpc

DECODE = WorkerRole.DECODE


@pytest.fixture
async def router():
    async with served() as (server, client):
        server.core.register(fake_info("d0", DECODE))
        yield server, client


async def test_counts_of_a_release_teach_the_predictor_and_its_error_is_shown(router):
    server, client = router
    decoded = fake_signature((2, 3), tokens=40)
    for number in range(130):
        booking = await client.reserve_decode(reservation_id=f"r{number}", signature=fake_signature((0, 1)))
        assert await client.release_decode(booking.reservation_id, Outcome.COMPLETED, 41, decoded)
    shown = (await client.get_policy()).decode_shares
    assert (shown.observations, shown.learned) == (130, True)
    assert 0 < shown.error < shown.plain_error
    core = server.core
    assert core.counters.value("eldr_decode_counts_total", result="learned") == 130
    assert core.gauges.value("eldr_predictor_error", model="fake", form="plain") == pytest.approx(
        shown.plain_error
    )
    assert core.gauges.value("eldr_predictor_error", model="fake", form="in-force") == pytest.approx(
        shown.error
    )


@pytest.mark.parametrize(
    ("spoil", "result"),
    [
        (lambda message: message.ClearField("counts"), "bad-signature"),
        (lambda message: setattr(message, "covered_tokens", 7), "bad-signature"),
        (lambda message: setattr(message, "fingerprint", "other"), "signature-mismatch"),
        (lambda message: setattr(message, "layers", 1 << 20), "signature-mismatch"),
        (lambda message: setattr(message, "experts", 0), "signature-mismatch"),
    ],
)
async def test_counts_that_cannot_be_read_do_not_hurt_the_release(router, spoil, result):
    server, client = router
    booking = await client.reserve_decode(signature=fake_signature())
    message = encode_signature(fake_signature())
    spoil(message)
    async with raw_channel(client) as channel:
        request = routing_pb2.ReleaseDecodeRequest(
            reservation_id=booking.reservation_id,
            outcome=routing_pb2.OUTCOME_COMPLETED,
            decoded=message,
        )
        answer = await routing_pb2_grpc.RouterServiceStub(channel).ReleaseDecode(request)
    assert answer.released
    core = server.core
    assert core.counters.value("eldr_decode_counts_total", result=result) == 1
    assert core.models.find("").predictor.observations == 0


@pytest.mark.parametrize(
    ("prompt", "decoded", "result"),
    [
        (fake_signature(), fake_signature(tokens=3), "short"),
        (None, fake_signature(), "no-signature"),
        (
            ExpertSignature("fake-model", 2, 0, 0, np.zeros(FAKE_GEOMETRY.shape, np.uint32)),
            fake_signature(),
            "empty",
        ),
        (fake_signature(), fake_signature(), "learned"),
    ],
)
def test_what_teaches_nothing_is_counted_by_name(prompt, decoded, result):
    rig = CoreRig()
    rig.join("d0")
    rig.core.reserve_decode(DecodeRequest("r", prompt))
    assert rig.core.release(DECODE, "r", Outcome.COMPLETED, decoded=ReadSignature(decoded, ""))
    assert rig.core.counters.value("eldr_decode_counts_total", result=result) == 1
    assert rig.core.models.find("").predictor.observations == (result == "learned")


def test_counts_of_a_released_booking_teach_nothing_twice():
    rig = CoreRig()
    rig.join("d0")
    rig.reserve("r")
    for released in (True, False):
        decoded = ReadSignature(fake_signature(), "")
        assert rig.core.release(DECODE, "r", Outcome.COMPLETED, decoded=decoded) is released
    assert rig.core.models.find("").predictor.observations == 1
    assert rig.core.models.find("").predictor.form is PLAIN


async def test_counts_go_from_the_decoder_over_the_gateway_to_the_predictor():
    worker, counts = FakeDecodeWorker("d0"), Counts()
    async with served(None, worker) as (server, client), contextlib.AsyncExitStack() as stack:
        workers = WorkerClients()
        stack.push_async_callback(workers.close)
        await until(lambda: bool(server.core.views()))
        worker.decode_counts["r"] = fake_signature((2, 3), tokens=40)
        await client.reserve_decode(reservation_id="r", signature=fake_signature((0, 1)))
        decoded = await DecodedCounts(1.0, workers.decode_counts, counts).read(worker.address, "r")
        await client.release_decode("r", Outcome.COMPLETED, 41, decoded)
        assert (await client.get_policy()).decode_shares.observations == 1
    assert counts == {Event.DECODED_SENT: 1}
