"""A served router: status codes, health, streams, limits and deadlines."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_rig import fake_profile, raw_channel, served, silent_server, until

from eldr.calibration.fit_record import Provenance
from eldr.client import NoWorkerError, Outcome, RouterClient, RouterError
from eldr.router.server import ListenError, RouterServer
from eldr.router.settings import RouterSettings
from eldr.rpc import settings as rpc_settings
from eldr.rpc.codec import encode_signature
from eldr.rpc.worker_info import WorkerRole
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.fake_services import FakeDecodeWorker, fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature
from eldr.v1 import fleet_pb2, fleet_pb2_grpc, routing_pb2, routing_pb2_grpc

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.fixture
async def router():
    async with served() as (server, client):
        yield server, client


def join(server, *worker_ids):
    for worker_id in worker_ids:
        server.core.register(fake_info(worker_id, DECODE if worker_id.startswith("d") else PREFILL))


async def code_of(call):
    with pytest.raises(RouterError) as caught:
        await call
    return caught.value.code, caught.value.detail


async def test_every_refusal_has_its_status_code_and_names_the_field(router):
    server, client = router
    join(server, "d0", "p0")
    code = grpc.StatusCode
    assert await code_of(client.release_decode("", Outcome.COMPLETED)) == (
        code.INVALID_ARGUMENT,
        "reservation_id must not be empty",
    )
    got, detail = await code_of(client.reserve_decode(reservation_id="x" * 300))
    assert got is code.INVALID_ARGUMENT
    assert "reservation_id must have at most 256 characters, got 300" in detail
    got, detail = await code_of(client.set_policy("jsq", {"tau": 1.0}))
    assert got is code.INVALID_ARGUMENT
    assert "unknown option 'tau'" in detail
    got, detail = await code_of(client.load_profile(b"no profile"))
    assert got is code.INVALID_ARGUMENT
    got, detail = await code_of(client.register(fake_info("d1", DECODE, block_size=32)))
    assert got is code.FAILED_PRECONDITION
    assert detail == "block_size differs: worker d1 has 32, worker d0 has 16"
    got, detail = await code_of(client.drain("nobody"))
    assert (got, detail) == (code.NOT_FOUND, "no worker 'nobody' is registered")
    got, detail = await code_of(client.select_prefill(model="other"))
    assert got is code.NOT_FOUND
    await client.release_decode("early", Outcome.CANCELLED)
    got, detail = await code_of(client.reserve_decode(reservation_id="early"))
    assert (got, detail) == (code.FAILED_PRECONDITION, "reservation_id early was already released")


async def test_malformed_messages_are_invalid_arguments(router):
    _, client = router
    async with raw_channel(client) as channel:
        routing = routing_pb2_grpc.RouterServiceStub(channel)
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        calls = [
            (routing.ReleaseDecode(routing_pb2.ReleaseDecodeRequest(reservation_id="r")), "outcome"),
            (routing.ReleasePrefill(routing_pb2.ReleasePrefillRequest(reservation_id="r", outcome=99)), "99"),
            (fleet.RegisterWorker(fleet_pb2.RegisterWorkerRequest()), "role"),
        ]
        for call, names in calls:
            with pytest.raises(grpc.aio.AioRpcError, match=names) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_worker_is_told_from_no_router(router):
    """Case 2.20: the reason travels; the client does not take it for a lost connection."""
    _, client = router
    with pytest.raises(NoWorkerError, match="no prefill worker is registered") as caught:
        await client.select_prefill()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(NoWorkerError, match="no decoder is registered"):
        await client.reserve_decode()


@pytest.mark.parametrize(
    ("spoil", "fallback"),
    [
        (lambda message: message.ClearField("counts"), "bad-signature"),
        (lambda message: setattr(message, "schema_version", 99), "bad-signature"),
        (lambda message: setattr(message, "covered_tokens", 7), "bad-signature"),
        (lambda message: setattr(message, "fingerprint", "other"), "signature-mismatch"),
        (lambda message: setattr(message, "layers", 1 << 20), "signature-mismatch"),
    ],
)
async def test_a_signature_that_does_not_unpack_is_a_counted_fallback(router, spoil, fallback):
    """Case 3.20 at the wire: nothing that a signature holds fails the request."""
    server, client = router
    join(server, "d0")
    message = encode_signature(fake_signature())
    spoil(message)
    async with raw_channel(client) as channel:
        request = routing_pb2.ReserveDecodeRequest(query=routing_pb2.DecodeQuery(signature=message))
        answer = await routing_pb2_grpc.RouterServiceStub(channel).ReserveDecode(request)
    assert answer.decision.fallback == fallback
    assert answer.decision.worker.worker_id == "d0"
    assert server.core.counters.value("eldr_signatures_total", result=fallback) == 1


async def test_a_signature_that_covers_too_little_does_not_steer(router):
    """Case 1.17."""
    server, client = router
    join(server, "d0")
    half = fake_signature(tokens=10)
    for tokens, fallback in ((20, ""), (21, "low-coverage")):
        signature = ExpertSignature(half.fingerprint, half.top_k, tokens, 10, half.counts)
        assert (await client.reserve_decode(signature=signature)).decision.fallback == fallback
    empty = ExpertSignature(half.fingerprint, half.top_k, 0, 0, np.zeros_like(half.counts))
    assert (await client.reserve_decode(signature=empty)).decision.fallback == "empty-signature"


async def test_decisions_and_the_fleet_can_be_watched(router):
    server, client = router
    fleet = client.watch_fleet()
    first = await anext(fleet)
    assert first.workers == ()
    join(server, "d0")
    second = await anext(fleet)
    assert [worker.info.worker_id for worker in second.workers] == ["d0"]
    assert second.generation > first.generation

    decisions = client.watch_decisions()
    event = asyncio.create_task(anext(decisions))
    await until(lambda: server.core.decisions.readers == 1)
    booking = await client.reserve_decode(signature=fake_signature())
    seen = await event
    assert (seen.reservation_id, seen.decision.worker_id) == (booking.reservation_id, "d0")
    assert seen.dropped == 0
    assert 0 < seen.seconds < 1
    await decisions.aclose()
    await fleet.aclose()
    await until(lambda: server.core.decisions.readers == 0)


async def test_profiles_travel_and_must_be_of_the_fleets_model(router):
    server, client = router
    join(server, "d0", "d1")
    assert not (await client.get_profile()).loaded
    assert "locality-band" not in (await client.get_policy()).available
    loaded = await client.load_profile(fake_profile().to_bytes())
    assert (loaded.fingerprint, loaded.clusters) == ("fake-model", 2)
    status = await client.get_profile()
    assert (status.transform, status.layer_mask) == ("count", (0, 1))
    assert status.provenance["requests"] == 2
    await client.set_policy("locality-band", {"tau": 0.2})
    booking = await client.reserve_decode(signature=fake_signature())
    assert (booking.decision.policy, booking.decision.fallback) == ("locality-band", "")

    other = fake_profile(fingerprint="other").to_bytes()
    code, detail = await code_of(client.load_profile(other))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "'other'" in detail
    assert "'fake-model'" in detail
    await client.remove("d0")
    await client.remove("d1")
    stranger = fake_info("d2", DECODE, geometry=type(FAKE_GEOMETRY)((1, 2), 8, 2, "stranger"))
    code, detail = await code_of(client.register(stranger))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "stranger" in detail


async def test_health_is_serving_then_not_serving_first():
    async with served() as (server, client), raw_channel(client) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "eldr.v1.RouterService", "eldr.v1.FleetService", "eldr.v1.ProfileService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop(notice_s=0.3, grace_s=0.1))
        await asyncio.sleep(0.05)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await client.workers() == []
        await stopping


async def test_reflection_only_where_it_is_asked_for():
    for wanted in (False, True):
        async with served(RouterSettings(reflection=wanted)) as (_, client), raw_channel(client) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([request]))
            if wanted:
                names = [s.name async for m in call for s in m.list_services_response.service]
                assert "eldr.v1.RouterService" in names
            else:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()


async def test_a_busy_port_is_said_plainly():
    async with served() as (_, client):
        with pytest.raises(ListenError, match="cannot listen on"):
            await RouterServer(RouterSettings()).start(client.addresses[0])


async def test_messages_over_four_mebibytes_pass(router):
    """Case 4.2: limits are set on both sides from one setting."""
    _, client = router
    code, detail = await code_of(client.load_profile(b"x" * (5 << 20)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "larger" not in detail
    large = fake_profile(provenance=Provenance("x" * 100_000, 2, "2026-01-01", "0", 0))
    answer = await client.load_profile(large.to_bytes())
    assert answer.clusters == 2
    assert len((await client.get_profile()).provenance["counts_sha256"]) == 100_000


async def test_a_message_over_the_limit_is_refused_by_name(router, monkeypatch):
    """Case 4.2: too large is an answer of its own, not UNAVAILABLE."""
    _, client = router
    monkeypatch.setattr(rpc_settings, "MAX_MESSAGE_BYTES", 1 << 20)
    async with RouterClient(client.addresses[0]) as small:
        code, detail = await code_of(small.load_profile(b"x" * (2 << 20)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in detail


async def test_a_proxy_in_the_environment_is_not_used(monkeypatch):
    """Case 4.7: http_proxy and friends point at a dead address; everything is on localhost."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with served(RouterSettings(), FakeDecodeWorker("d0")) as (server, client):
        await until(lambda: bool(server.core.workers()) and server.core.workers()[0].state is not None)
        assert (await client.workers())[0].health == "live"


async def test_every_unary_call_to_a_router_that_never_answers_has_a_deadline():
    """Case 4.10."""
    info = fake_info("d0", DECODE)
    async with silent_server() as address, RouterClient(address, timeout_s=0.2) as client:
        calls = [
            client.select_prefill(),
            client.release_prefill("r", Outcome.COMPLETED),
            client.reserve_decode(),
            client.release_decode("r", Outcome.COMPLETED),
            client.explain_decode(),
            client.workers(),
            client.register(info),
            client.drain("d0"),
            client.remove("d0"),
            client.get_policy(),
            client.set_policy("jsq"),
            client.get_profile(),
            client.load_profile(b""),
        ]
        begun_s = time.monotonic()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - begun_s < 2.0
        assert all(isinstance(error, RouterError) for error in ended)


async def test_cancelled_streams_leave_no_reader_behind(router):
    """Case 4.1: every cancelled stream is let go of."""
    server, client = router
    for _ in range(50):
        stream = client.watch_fleet()
        await anext(stream)
        await stream.aclose()
    await until(lambda: server.core.changes.readers == 1)  # The router's own.


def test_sigterm_ends_the_process_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-m", "eldr.cli.main", "router", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        for line in process.stdout:
            if "router_started" in line:
                break
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, rest
    assert "router_stopped" in rest
