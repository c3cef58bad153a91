"""Every RPC of the router and of the workers with anything in it: an answer or a refusal, never a failure.

A failure is INTERNAL or UNKNOWN (an exception that nobody foresaw), or no answer in time.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from hypothesis import strategies as st

from eldr.client import WorkerInfo, WorkerRole
from eldr.cluster.ports import free_ports
from eldr.engine.config import EngineConfig
from eldr.engine.handoff import PrefillHandoff
from eldr.engine.scheduler import DecodeScheduler
from eldr.engine.services import DecodeServicer, PrefillServicer, WorkerServer
from eldr.router.server import RouterServer
from eldr.router.settings import RouterSettings
from eldr.rpc.codec import encode_signature, encode_worker_info
from eldr.rpc.settings import channel_options
from eldr.testing.fake_services import FakeDecodeWorker, FakePrefillWorker, fake_info
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature
from eldr.v1 import decode_pb2, decode_pb2_grpc, fleet_pb2, prefill_pb2, routing_pb2

FAILURES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
ROUTER = (fleet_pb2, routing_pb2)

Method = tuple[str, Descriptor]
Rpc = Callable[[str, bytes], grpc.StatusCode]


def methods(files: tuple[Any, ...], streams: bool) -> list[Method]:
    """Path and request of each call."""
    return [
        (f"/{service.full_name}/{method.name}", method.input_type)
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.server_streaming is streams
    ]


def named(method: Method) -> str:
    return method[0].rpartition("/")[2]


# Words that lead on past the first check.
WORDS = ["d0", "p0", "fake", "jsq", "union-cost", "locality-band", "tau", "127.0.0.1:1", "http://127.0.0.1:1"]
TEXT = st.sampled_from(["", *WORDS, FAKE_GEOMETRY.fingerprint]) | st.text(max_size=20)
RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: (-3, 12),
}


def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """Any value of one field, small ones more often."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=64)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e-300]) | st.floats()
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    low, high = RANGES[field.type]
    return st.integers(max(low, 0), min(high, 8)) | st.integers(low, high)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with any of its fields set to anything that its types can hold."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if depth > 4 or not draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            pairs = st.dictionaries(TEXT, values(entry["value"], depth + 1), max_size=3)
            getattr(message, field.name).update(draw(pairs))
        elif field.is_repeated:
            for value in draw(st.lists(values(field, depth), max_size=3)):
                holder = getattr(message, field.name)
                holder.add().CopyFrom(value) if isinstance(value, Message) else holder.append(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(values(field, depth)))
        else:
            setattr(message, field.name, draw(values(field, depth)))
    return message


QUERY = routing_pb2.DecodeQuery(
    model="fake", signature=encode_signature(fake_signature()), prompt_tokens=64, max_tokens=8, domain="code"
)
GOOD: dict[str, Message] = {
    "/eldr.v1.RouterService/ReserveDecode": routing_pb2.ReserveDecodeRequest(query=QUERY),
    "/eldr.v1.RouterService/ExplainDecode": routing_pb2.ExplainDecodeRequest(query=QUERY, policy="jsq"),
    "/eldr.v1.FleetService/RegisterWorker": fleet_pb2.RegisterWorkerRequest(
        info=encode_worker_info(fake_info("d9", WorkerRole.DECODE))
    ),
    "/eldr.v1.ProfileService/SetPolicy": routing_pb2.SetPolicyRequest(
        policy="union-cost", options={"tail_guard": 0.1}
    ),
}


class Loop:
    """An event loop on a thread, for the whole file."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def calls_to(channel: grpc.Channel) -> Rpc:
    """Sends bytes to a unary call and tells how it ended."""

    def call(path: str, raw: bytes) -> grpc.StatusCode:
        try:
            channel.unary_unary(path)(raw, timeout=10)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    return call


@pytest.fixture(scope="module")
def router(loop: Loop) -> Iterator[grpc.Channel]:
    """A router with a live decoder and a live prefill worker."""
    workers = [FakeDecodeWorker("d0"), FakePrefillWorker("p0")]
    for worker in workers:
        loop.run(worker.start())
    addresses = tuple(worker.address for worker in workers)
    server = RouterServer(RouterSettings(workers=addresses, registrations_per_s=1e6))
    port = loop.run(server.start("127.0.0.1:0"))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        yield channel
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    loop.run(server.stop(grace_s=0.1))
    for worker in workers:
        loop.run(worker.stop())


@pytest.mark.parametrize("method", methods(ROUTER, streams=False), ids=named)
def test_the_router_answers_or_refuses_any_message(router: grpc.Channel, method: Method) -> None:
    call = calls_to(router)

    @settings(max_examples=60)
    @given(messages(method[1]))
    def ends_well(message: Message) -> None:
        assert call(method[0], message.SerializeToString()) not in FAILURES

    ends_well()


@pytest.mark.parametrize("path", sorted(GOOD), ids=lambda path: path.rpartition("/")[2])
def test_the_router_answers_or_refuses_a_good_message_with_any_bytes_changed(
    router: grpc.Channel, path: str
) -> None:
    """Goes deeper than messages made at random: most of these are nearly right."""
    call, good = calls_to(router), GOOD[path].SerializeToString()
    assert call(path, good) is grpc.StatusCode.OK

    @settings(max_examples=200)
    @given(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4))
    def ends_well(changes: list[tuple[int, int]]) -> None:
        bent = bytearray(good)
        for index, value in changes:
            bent[index] = value
        assert call(path, bytes(bent)) not in FAILURES

    ends_well()


@pytest.mark.parametrize("method", methods(ROUTER, streams=False) + methods(ROUTER, streams=True), ids=named)
def test_bytes_that_are_no_message_are_the_callers_fault(router: grpc.Channel, method: Method) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        next(router.unary_stream(method[0])(b"\xff\xff\xff", timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class Worker:
    """The services of one engine without the engine, on a port of their own."""

    def __init__(self, role: WorkerRole) -> None:
        config = EngineConfig(
            "w0", f"127.0.0.1:{free_ports(1)[0]}", "http://127.0.0.1:1", state_min_gap_s=0.01
        )
        info = fake_info("w0", role, grpc_address=config.grpc_listen, incarnation=config.incarnation)
        self.server = WorkerServer(config, info)
        self.service = DecodeServicer(info, config, decoder()) if role is WorkerRole.DECODE else prefill(info)
        self.server.start(self.service)
        self.channel = grpc.insecure_channel(config.grpc_listen, options=channel_options())

    def close(self) -> None:
        self.channel.close()
        self.server.stop()


def decoder() -> DecodeScheduler:
    engine = SimpleNamespace(
        running=[], kv_cache_manager=SimpleNamespace(usage=0.5), get_request_counts=lambda: (3, 1)
    )
    tap = DecodeScheduler(engine, FAKE_GEOMETRY, 4, lambda: None)
    tap.step_ended(False)
    return tap


def prefill(info: WorkerInfo) -> PrefillServicer:
    return PrefillServicer(info, PrefillHandoff(FAKE_GEOMETRY, 4, lambda *_: None), lambda: 0.5)


@pytest.fixture(scope="module", params=[(decode_pb2, WorkerRole.DECODE), (prefill_pb2, WorkerRole.PREFILL)])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Any]]:
    """A worker and the file of its service."""
    file, role = request.param
    made = Worker(role)
    yield made, file
    made.close()


def test_a_worker_answers_or_refuses_any_message(worker: tuple[Worker, Any]) -> None:
    served, file = worker
    call = calls_to(served.channel)

    @settings(max_examples=200)
    @given(st.data())
    def ends_well(data: st.DataObject) -> None:
        path, request = data.draw(st.sampled_from(methods((file,), streams=False)))
        assert call(path, data.draw(messages(request)).SerializeToString()) not in FAILURES

    ends_well()


def test_bytes_that_are_no_message_are_the_fault_of_a_workers_caller(worker: tuple[Worker, Any]) -> None:
    served, file = worker
    for path, _request in methods((file,), streams=False) + methods((file,), streams=True):
        with pytest.raises(grpc.RpcError) as caught:
            next(served.channel.unary_stream(path)(b"\xff\xff\xff", timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("period_s", [math.nan, math.inf, -math.inf, -1.0, -5e-324])
def test_a_period_that_is_none_is_refused_and_the_worker_goes_on(period_s: float) -> None:
    """A timer at NaN would disorder all timers of the worker's event loop."""
    served = Worker(WorkerRole.DECODE)
    try:
        stub = decode_pb2_grpc.DecodeServiceStub(served.channel)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.WatchState(decode_pb2.WatchStateRequest(period_s=period_s), timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "period_s" in str(caught.value.details())
        reports = stub.WatchState(decode_pb2.WatchStateRequest(period_s=0.01), timeout=10)
        assert [next(reports).state.worker_id for _ in range(3)] == ["w0"] * 3
        reports.cancel()
    finally:
        served.close()
