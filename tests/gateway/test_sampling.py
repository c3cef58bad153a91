"""Sampled requests leave their counts behind; the client sees no difference."""

from dataclasses import dataclass, field

import pytest

from eldr.gateway.sampling import KEEP_COUNTS, FinishedRequest
from eldr.testing.faults import Fault, FaultKind

BODY = {"model": "fake", "prompt": "one two three", "max_tokens": 5}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4}


@dataclass
class Sampler:
    """Samples all or nothing and keeps what it is offered."""

    all: bool = True
    offered: list[FinishedRequest] = field(default_factory=list)

    def wanted(self) -> bool:
        return self.all

    def offer(self, finished: FinishedRequest) -> None:
        self.offered.append(finished)


@pytest.fixture
async def sampled(make_fleet):
    """A fleet whose prefill engines give signatures, with a sampler of everything."""
    sampler = Sampler()
    fleet = await make_fleet(sampler=sampler)
    for engine in fleet.prefills:
        engine.signature = lambda rendered: f"signature of {rendered}"
    return fleet, sampler


async def raw(fleet, body: dict, path: str = "/v1/completions", **options) -> bytes:
    async with fleet.post(path, body, **options) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
async def test_the_clients_bytes_are_those_of_an_unsampled_request(sampled, path, body, stream):
    fleet, sampler = sampled
    answers = []
    for sampler.all in (False, True):
        answers.append(await raw(fleet, {**body, "stream": stream}, path))
    assert without_ids(answers[0]) == without_ids(answers[1])
    assert len(sampler.offered) == 1
    assert b"eldr" not in without_ids(answers[1])


def without_ids(answer: bytes) -> bytes:
    """The fake engine puts the leg's id, which is new for each request, into `id`."""
    parts = answer.split(b'"cmpl-eldr-')
    return parts[0] + b"".join(part[32:] for part in parts[1:])


async def test_only_the_decode_leg_of_a_sampled_request_keeps_counts(sampled):
    fleet, sampler = sampled
    for sampler.all in (False, True):
        await raw(fleet, BODY)
    plain, kept = fleet.sent_to(fleet.decodes)
    assert not KEEP_COUNTS.items() & plain["kv_transfer_params"].items()
    assert KEEP_COUNTS.items() <= kept["kv_transfer_params"].items()
    for body in fleet.sent_to(fleet.prefills):
        assert not KEEP_COUNTS.keys() & body["kv_transfer_params"].keys()


async def test_what_is_offered_names_the_booking_and_the_decoder_and_no_text(sampled):
    fleet, sampler = sampled
    await raw(fleet, BODY, headers={"x-eldr-domain": "law"})
    (offered,) = sampler.offered
    kept = fleet.sent_to(fleet.decodes)[0]["kv_transfer_params"]
    assert offered.id == kept["eldr_reservation_id"]
    assert offered.signature == "signature of one two three"
    assert (offered.decode_grpc, offered.domain) == ("grpc-of-d0", "law")


async def test_a_retried_request_is_offered_once_under_the_last_booking(sampled):
    fleet, sampler = sampled
    fleet.decodes[0].faults.append(Fault(FaultKind.STATUS, status=503))
    await raw(fleet, BODY)
    (offered,) = sampler.offered
    assert offered.decode_grpc == "grpc-of-d1"


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.CUT, FaultKind.ERROR_FINISH])
async def test_a_stream_that_fails_is_not_offered(make_fleet, kind):
    sampler = Sampler()
    fleet = await make_fleet(sampler=sampler, idle_timeout_s=0.2)
    fleet.prefills[0].signature = lambda rendered: "s"
    fleet.decodes[0].faults.append(Fault(kind, after_tokens=2))
    await fleet.stream(BODY)
    await fleet.settled()
    assert sampler.offered == []


async def test_a_request_without_a_signature_is_not_offered(fleet, make_fleet):
    sampler = Sampler()
    fleet = await make_fleet(sampler=sampler)
    await raw(fleet, BODY)
    assert sampler.offered == []


async def test_an_answer_of_the_prefill_leg_alone_is_offered_without_a_decoder(make_fleet):
    """Case 1.14: the prompt's signature comes from prefill, also when there is no decode leg."""
    sampler = Sampler()
    fleet = await make_fleet(sampler=sampler, first_token_from_prefill=True)
    fleet.prefills[0].signature = lambda rendered: "s"
    await raw(fleet, {**BODY, "max_tokens": 1, "temperature": 0})
    (offered,) = sampler.offered
    assert (offered.signature, offered.decode_grpc) == ("s", "")
    assert fleet.sent_to(fleet.decodes) == []
