"""PrefillService and DecodeService over a real channel, as they run inside an engine process."""

import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eldr.cluster.ports import free_ports
from eldr.engine.config import EngineConfig
from eldr.engine.handoff import PrefillHandoff
from eldr.engine.pull_check import KvSource
from eldr.engine.scheduler import DecodeScheduler
from eldr.engine.services import DecodeServicer, PrefillServicer, WorkerServer
from eldr.engine.transfer_questions import TransferQuestions
from eldr.rpc.codec import decode_signature, decode_state, decode_worker_info
from eldr.rpc.settings import channel_options
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature import ExpertSignature, ModelGeometry
from eldr.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")


def config_of(address: str, **settings: Any) -> EngineConfig:
    return EngineConfig("w0", address, "http://127.0.0.1:1", **settings)


def info_of(config: EngineConfig, role: WorkerRole) -> WorkerInfo:
    return WorkerInfo("w0", config.incarnation, role, config.http_url, config.grpc_listen, GEOMETRY, "m", 32)


class Worker:
    """One served worker, its state and a channel to it."""

    def __init__(self, role: WorkerRole, **settings: Any) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.config = config_of(self.address, **settings)
        self.info = info_of(self.config, role)
        self.server = WorkerServer(self.config, self.info)
        self.engine = SimpleNamespace(
            running=[],
            kv_cache_manager=SimpleNamespace(usage=0.5),
            get_request_counts=lambda: (3, self.waiting),
        )
        self.waiting = 1
        if role is WorkerRole.PREFILL:
            self.prefill = PrefillServicer(self.info, PrefillHandoff(GEOMETRY, 4, self._publish), lambda: 0.5)
            self.server.start(self.prefill)
        else:
            self.tap = DecodeScheduler(
                self.engine, GEOMETRY, 4, lambda: self.server.call_soon(self.decode.membership_changed)
            )
            self.kept: dict[str, ExpertSignature] = {}
            self.decode = DecodeServicer(self.info, self.config, self.tap, self.kept.get)
            self.server.start(self.decode)
            self.tap.step_ended(False)
        self.channel = grpc.insecure_channel(self.address, options=channel_options())

    def _publish(self, request_id: str, signature: Any) -> None:
        self.server.call_soon(self.prefill.publish, request_id, signature)

    @property
    def handoff(self) -> PrefillHandoff:
        return self.prefill._handoff

    def close(self) -> None:
        self.channel.close()
        self.server.stop()


@pytest.fixture
def prefill_worker() -> Iterator[Worker]:
    worker = Worker(WorkerRole.PREFILL)
    yield worker
    worker.close()


@pytest.fixture
def decode_worker() -> Iterator[Worker]:
    worker = Worker(WorkerRole.DECODE, state_period_s=0.2, state_min_gap_s=0.02)
    yield worker
    worker.close()


def complete(handoff: PrefillHandoff, name: str, tokens: int = 4) -> None:
    counts = np.zeros((2, 8), np.int32)
    counts[:, :2] = tokens
    handoff.completed(name, tokens, counts)


def test_a_prefill_worker_serves_its_info_and_recent_signatures(prefill_worker: Worker) -> None:
    stub = prefill_pb2_grpc.PrefillServiceStub(prefill_worker.channel)
    answer = stub.GetInfo(prefill_pb2.PrefillServiceGetInfoRequest(), timeout=5)
    assert decode_worker_info(answer.info) == prefill_worker.info
    assert answer.kv_usage == 0.5
    complete(prefill_worker.handoff, "a")
    found = stub.GetSignature(prefill_pb2.GetSignatureRequest(transfer_id="a"), timeout=5)
    assert decode_signature(found.signature).tokens == 4
    with pytest.raises(grpc.RpcError) as error:
        stub.GetSignature(prefill_pb2.GetSignatureRequest(transfer_id="b"), timeout=5)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_transfer_of_an_earlier_process_is_never_released(prefill_worker: Worker) -> None:
    stub = prefill_pb2_grpc.PrefillServiceStub(prefill_worker.channel)
    prefill_worker.handoff.finished("a", True, {})
    stale = prefill_pb2.ReleaseTransferRequest(transfer_id="a", incarnation="before")
    assert not stub.ReleaseTransfer(stale, timeout=5).released
    assert prefill_worker.handoff.take_releases() == []
    now = prefill_pb2.ReleaseTransferRequest(transfer_id="a", incarnation=prefill_worker.config.incarnation)
    assert stub.ReleaseTransfer(now, timeout=5).released
    assert prefill_worker.handoff.take_releases() == ["a"]


def questions(
    decode: Worker, reader: str, answers: "queue.SimpleQueue[tuple[str, bool]]"
) -> TransferQuestions:
    """A decoder's, on its own loop."""
    return TransferQuestions(reader, lambda request_id, intact: answers.put((request_id, intact)))


def test_a_decoder_asks_a_prefill_worker_whether_its_pull_was_in_time(
    prefill_worker: Worker, decode_worker: Worker
) -> None:
    """Case 2.1, over real channels: read in time, expired, another process's, another reader's."""
    transfers = prefill_worker.handoff.transfers
    for name in ("held", "read", "expired"):
        transfers.hold(name)
    transfers.end({"read", "expired"}, {"expired"})
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    mine, other = questions(decode_worker, "d0", answers), questions(decode_worker, "d1", answers)

    def ask(side: TransferQuestions, transfer_id: str, incarnation: str = "", address: str = "") -> bool:
        source = KvSource(transfer_id, address or prefill_worker.address, incarnation)
        decode_worker.server.call_soon(side.ask, "r", source)
        request_id, intact = answers.get(timeout=10)
        assert request_id == "r"
        return intact

    now = prefill_worker.config.incarnation
    assert [ask(mine, name, now) for name in ("held", "read", "expired", "never")] == [
        True,
        True,
        False,
        False,
    ]
    assert not ask(mine, "held", "before"), "a transfer of an earlier process"
    assert not ask(other, "read", now), "another decoder's pull"
    assert not ask(mine, "held", now, f"127.0.0.1:{free_ports(1)[0]}"), "nobody answers"
    decode_worker.server.stop(mine.close)


def test_a_slow_watcher_of_signatures_loses_the_oldest_and_is_told(
    prefill_worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eldr.engine.services.WATCH_BACKLOG", 4)
    stub = prefill_pb2_grpc.PrefillServiceStub(prefill_worker.channel)
    stream = stub.WatchSignatures(prefill_pb2.WatchSignaturesRequest(), timeout=20)
    while not prefill_worker.prefill.watched:
        time.sleep(0.005)
    done = threading.Event()

    def flood() -> None:
        for number in range(64):
            prefill_worker.prefill.publish(str(number), prefill_worker.handoff.signature("x"))  # type: ignore[arg-type]
        done.set()

    complete(prefill_worker.handoff, "x")
    assert next(stream).transfer_id == "x"
    prefill_worker.server.call_soon(flood)
    assert done.wait(5)
    last = None
    for last in stream:
        if last.transfer_id == "63":
            break
    assert last is not None
    assert last.dropped == 60
    stream.cancel()


def test_state_reports_come_at_least_once_a_period_and_count_up(decode_worker: Worker) -> None:
    stub = decode_pb2_grpc.DecodeServiceStub(decode_worker.channel)
    stream = stub.WatchState(decode_pb2.WatchStateRequest(), timeout=20)
    begin = time.monotonic()
    states = [decode_state(next(stream).state) for _ in range(4)]
    assert 0.5 < time.monotonic() - begin < 5
    assert [state.sequence for state in states] == [1, 2, 3, 4]
    assert (states[0].running, states[0].waiting, states[0].kv_usage) == (3, 1, 0.5)
    assert states[3].age_s > states[0].age_s
    stream.cancel()


def test_a_change_of_membership_is_reported_before_the_period_ends() -> None:
    worker = Worker(WorkerRole.DECODE, state_period_s=30.0, state_min_gap_s=0.01)
    try:
        stream = decode_pb2_grpc.DecodeServiceStub(worker.channel).WatchState(
            decode_pb2.WatchStateRequest(), timeout=20
        )
        next(stream)
        worker.tap.arrived("r", "res")
        worker.waiting = 2
        worker.tap.step_ended(False)
        state = decode_state(next(stream).state)
        assert state.reservation_ids == {"res"}
        assert state.waiting == 2
        stream.cancel()
    finally:
        worker.close()


def test_kept_decode_counts_are_served_by_reservation(decode_worker: Worker) -> None:
    stub = decode_pb2_grpc.DecodeServiceStub(decode_worker.channel)
    counts = np.zeros((2, 8), np.uint32)
    counts[:, 1:3] = 5
    decode_worker.kept["res"] = ExpertSignature("f", 2, 5, 5, counts)
    answer = stub.GetDecodeCounts(decode_pb2.GetDecodeCountsRequest(reservation_id="res"), timeout=5)
    np.testing.assert_array_equal(decode_signature(answer.signature).counts, counts)
    with pytest.raises(grpc.RpcError) as error:
        stub.GetDecodeCounts(decode_pb2.GetDecodeCountsRequest(reservation_id="other"), timeout=5)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_drain_shows_in_the_reports(decode_worker: Worker) -> None:
    stub = decode_pb2_grpc.DecodeServiceStub(decode_worker.channel)
    answer = stub.Drain(decode_pb2.DrainRequest(draining=True), timeout=5)
    assert (answer.running, answer.waiting) == (3, 1)
    assert stub.GetState(decode_pb2.GetStateRequest(), timeout=5).state.draining


def test_health_names_the_service(decode_worker: Worker) -> None:
    stub = health_pb2_grpc.HealthStub(decode_worker.channel)
    for name in ("", "eldr.v1.DecodeService"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_taken_address_stops_the_start_and_is_named(decode_worker: Worker) -> None:
    other = WorkerServer(decode_worker.config, decode_worker.info)
    with pytest.raises(RuntimeError, match=r"cannot listen on .*eldr.grpc_listen"):
        other.start(DecodeServicer(decode_worker.info, decode_worker.config, decode_worker.tap))
    other.stop()
