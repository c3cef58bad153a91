"""Which transfers the workers gave up, as NIXL's own worker ends them, on its way to the scheduler."""

import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from eldr.engine.nixl import note_expired
from eldr.engine.report import WorkerMetadata

pytestmark = pytest.mark.engine


class Worker:
    """The lease table of NIXL's worker with its own reaper."""

    _reap_expired_send_leases = NixlBaseConnectorWorker._reap_expired_send_leases

    def __init__(self, leases: dict[str, float]) -> None:
        self._reqs_to_send = leases
        self._reqs_to_process = set(leases)
        self.consumer_notification_counts_by_req: dict[str, int] = {}
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self.xfer_stats = SimpleNamespace(record_kv_expired_req=lambda: None)


def connector_of(worker: Any) -> NixlPullConnector:
    connector = object.__new__(NixlPullConnector)
    connector.connector_worker = worker
    return connector


def test_expired_leases_are_told_apart_from_transfers_that_were_read() -> None:
    """Case 2.28 too: the live entry stands first."""
    now = time.perf_counter()
    worker = Worker({"live": now + 60, "late": now - 1, "released": float("-inf")})
    noted: set[str] = set()
    note_expired(connector_of(worker), noted.update)
    done = {"read"}
    worker._reap_expired_send_leases(done)
    assert done == {"read", "late", "released"}
    assert noted == {"late", "released"}
    assert set(worker._reqs_to_send) == {"live"}


def test_a_connector_whose_children_are_no_nixl_connectors_has_no_leases() -> None:
    note_expired(SimpleNamespace(sub_connectors=[SimpleNamespace()]), pytest.fail)


def test_every_rank_says_what_it_gave_up() -> None:
    ranks = [WorkerMetadata(None, None, frozenset(names)) for names in ("a", "", "bc")]
    joined = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert pickle.loads(pickle.dumps(joined)).expired == frozenset("abc")
