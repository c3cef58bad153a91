"""Which answers carry a signature, and which blocks count as held for a decoder, whatever connector is inside."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from eldr.engine.config import EngineConfig
from eldr.engine.scheduler_side import SchedulerSide
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature import ModelGeometry

pytestmark = pytest.mark.engine

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")


@pytest.fixture
def side() -> SchedulerSide:
    """A prefill worker's, not served."""
    config = EngineConfig("w", "127.0.0.1:1", "http://127.0.0.1:1")
    info = WorkerInfo(
        "w", config.incarnation, WorkerRole.PREFILL, config.http_url, config.grpc_listen, GEOMETRY, "m", 16
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    vllm_config = SimpleNamespace(
        use_v2_model_runner=False,
        speculative_config=None,
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
    )
    manager = SimpleNamespace(usage=0.0, block_pool=SimpleNamespace(get_new_blocks=lambda count: []))
    groups = KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)])
    return SchedulerSide(config, info, vllm_config, groups, manager, None, can_release=True)


def request(status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED, **params: Any) -> Any:
    return SimpleNamespace(
        request_id="a", status=status, num_prompt_tokens=4, kv_transfer_params=params or None
    )


def finished(side: SchedulerSide, one: Any, held: bool = False, params: Any = None) -> Any:
    side.arrived(one)
    return side.finished(one, held, params)


def test_a_connectors_own_parameters_always_carry_the_signature(side: SchedulerSide) -> None:
    own = {"remote_request_id": "a"}
    assert finished(side, request(), True, own) is own
    assert own.pop("eldr_prefill_grpc") == "127.0.0.1:1"
    assert own.pop("eldr_prefill_incarnation")
    assert own == {"remote_request_id": "a", "eldr_signature": None}


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED])
def test_without_them_the_signature_comes_where_it_was_asked_for(
    status: RequestStatus, side: SchedulerSide
) -> None:
    assert finished(side, request(status, eldr_signature=True)) == {"eldr_signature": None}
    assert finished(side, request(status)) is None
    assert finished(side, request(status, eldr_signature="yes")) is None


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_an_answer_that_is_not_complete_carries_none(status: RequestStatus, side: SchedulerSide) -> None:
    """NIXL then gives no parameters, and the gateway must see that there is no hand-off."""
    assert finished(side, request(status, eldr_signature=True)) is None


def test_counts_and_signature_share_the_one_object_of_the_answer(side: SchedulerSide) -> None:
    answer = finished(side, request(eldr_signature=True, eldr_decode_counts=True), True, {"remote": 1})
    assert answer == {"remote": 1, "eldr_signature": None, "eldr_decode_signature": None}
    assert side.handoff is not None
    assert side.handoff._awaiting["a"] is answer


def test_blocks_kept_for_a_save_are_not_held_for_a_decoder(side: SchedulerSide) -> None:
    assert side.handoff is not None
    finished(side, request(eldr_signature=True), held=True)
    assert side.handoff.held == 0
    finished(side, request(), held=True, params={"remote_request_id": "a"})
    assert side.handoff.held == 1


def test_a_transfer_that_was_sent_before_its_request_ended_is_held_for_nobody(side: SchedulerSide) -> None:
    """Patch 0002 frees its blocks at the end of the request and no second notice comes (case 2.3)."""
    assert side.handoff is not None
    one = request()
    side.arrived(one)
    side.reported(None, {"a"})
    side.finished(one, True, {"remote_request_id": "a"})
    assert side.handoff.held == 0
    finished(side, request(), held=True, params={"remote_request_id": "a"})
    assert side.handoff.held == 1, "what is known of the first request does not concern the next"
    side.reported(None, {"a"})
    assert side.handoff.held == 0


def test_kept_counts_leave_the_answer_as_it_is_and_are_found_by_reservation(side: SchedulerSide) -> None:
    one = request(eldr_decode_counts="kept", eldr_reservation_id="res", do_remote_prefill=True)
    one.num_tokens = 5
    assert finished(side, one) is None
    side.reported(None, set())
    assert side._counts.kept("res") is not None


def test_counts_to_be_kept_under_no_reservation_are_not_tracked(side: SchedulerSide) -> None:
    side.arrived(request(eldr_decode_counts="kept"))
    assert "a" not in side._counts


def test_a_prompt_that_goes_on_after_what_prefill_computed_is_counted_from_there(side: SchedulerSide) -> None:
    """Case 1.16."""
    one = request(
        eldr_decode_counts="kept", eldr_reservation_id="res", do_remote_prefill=True, remote_num_tokens=3
    )
    side.arrived(one)
    assert side._counts.wanted("a", 4) == range(3, 4)
