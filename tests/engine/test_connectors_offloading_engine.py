"""KV that comes back from host memory, alone and beside NIXL in MultiConnector (case 1.1)."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from eldr.cluster.ports import free_ports
from eldr.rpc.codec import signature_from_text
from eldr.v1 import prefill_pb2, prefill_pb2_grpc

pytestmark = pytest.mark.engine

BLOCK = 32
SMALL_POOL = 1 << 22
"""About 1,300 tokens of KV: a few prompts evict the ones before."""

HOST = {"cpu_bytes_to_use": 1 << 26, "spec_name": "HostCopiesSpec", "spec_module_path": "host_copies"}
SIGNATURE_ONLY = {"eldr_signature": True}
PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False, "eldr_signature": True}


def prefill(engine: Any, prompts: list[list[int]], params: dict[str, Any]) -> list[Any]:
    from vllm import SamplingParams

    leg = SamplingParams(max_tokens=1, temperature=0.0, extra_args={"kv_transfer_params": dict(params)})
    return list(engine.generate([{"prompt_token_ids": ids} for ids in prompts], leg, use_tqdm=False))


def assert_exact_behind(
    uncovered_blocks: bool, prompts: list[list[int]], answers: list[Any], hf: Any
) -> None:
    """Every answer covers what was computed here, exactly; the reloaded blocks at its front are said."""
    for ids, answer in zip(prompts, answers, strict=True):
        signature = signature_from_text(answer.kv_transfer_params["eldr_signature"])
        assert signature.tokens == len(ids)
        uncovered = signature.tokens - signature.covered_tokens
        assert uncovered == ((len(ids) - 1) // BLOCK * BLOCK if uncovered_blocks else 0)
        np.testing.assert_array_equal(signature.counts, hf.counts(ids, uncovered)[1])


def test_reloaded_blocks_are_uncovered_and_the_rest_equals_the_reference(
    make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    """Prompts are evicted from the device, others use their blocks, and they come back from the host."""
    engine = make_engine(
        transfer={"kv_connector": "OffloadingConnector"}, extra=HOST, kv_cache_memory_bytes=SMALL_POOL
    )
    first = prompts[:6]
    assert_exact_behind(False, first, prefill(engine, first, SIGNATURE_ONLY), reference)
    for start in range(6, 60, 6):
        prefill(engine, prompts[start : start + 6], SIGNATURE_ONLY)
    again = prefill(engine, first, SIGNATURE_ONLY)
    assert_exact_behind(True, first, again, reference)
    assert all(answer.num_cached_tokens for answer in again)
    on_device = prefill(engine, first[:1], SIGNATURE_ONLY)
    # Its blocks are in the device's prefix cache now, and what was not computed here stays unknown.
    assert_exact_behind(True, first[:1], on_device, reference)


def test_a_request_that_asks_for_nothing_gets_no_parameters(
    make_engine: Callable[..., Any], prompts: list[list[int]]
) -> None:
    engine = make_engine(transfer={"kv_connector": "OffloadingConnector"}, extra=HOST)
    assert prefill(engine, prompts[:1], {})[0].kv_transfer_params is None
    (asked,) = prefill(engine, prompts[:1], SIGNATURE_ONLY)
    assert set(asked.kv_transfer_params) == {"eldr_signature"}, "nothing that looks like a transfer"


def child(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_producer", "kv_buffer_device": "cpu", **more}


def placed(place: str, address: str) -> dict[str, Any]:
    """Settings of an engine with NIXL and offloading in MultiConnector, and eldr around or inside it."""
    eldr = {"worker_id": "prefill-0", "grpc_listen": address, "http_url": "http://127.0.0.1:1"}
    nixl = {"kv_lease_duration": 20}
    offloading = child("OffloadingConnector", kv_connector_extra_config=HOST)
    if place == "inside":
        module = {"kv_connector_module_path": "eldr.engine.connector"}
        inner = child("NixlConnector", kv_connector_extra_config={"eldr": eldr, **nixl}, **module)
        extra: dict[str, Any] = {"connectors": [inner, offloading]}
        outer = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
    else:
        # Around it the order is free: here loads from the host come before NIXL's.
        extra = {
            "connectors": [offloading, child("NixlConnector", kv_connector_extra_config=nixl)],
            "eldr": eldr,
        }
        outer = {"kv_connector": place}
    return {"transfer": {**outer, "kv_connector_extra_config": extra}, "kv_cache_memory_bytes": SMALL_POOL}


@pytest.mark.parametrize("place", ["MultiConnector", "EldrMultiConnector", "inside"])
def test_nixl_and_offloading_together(
    place: str, make_engine: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    from vllm import SamplingParams

    address = f"127.0.0.1:{free_ports(1)[0]}"
    engine = make_engine(**placed(place, address))
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    assert scheduler.scheduler_tap is not None, "the patch finds the tap in every place"
    first = prompts[:4]
    with grpc.insecure_channel(address) as channel:
        worker = prefill_pb2_grpc.PrefillServiceStub(channel)

        def info() -> Any:
            return worker.GetInfo(prefill_pb2.PrefillServiceGetInfoRequest())

        def release(answers: list[Any]) -> None:
            for answer in answers:
                transfer = prefill_pb2.ReleaseTransferRequest(
                    transfer_id=answer.kv_transfer_params["remote_request_id"]
                )
                assert worker.ReleaseTransfer(transfer).released
            # This engine steps only inside generate(); a server steps while transfers are held.
            idle = SamplingParams(max_tokens=3, ignore_eos=True)
            engine.generate([{"prompt_token_ids": [1, 2, 3]}], idle, use_tqdm=False)

        answers = prefill(engine, first, PREFILL_LEG)
        assert_exact_behind(False, first, answers, reference)
        assert all(answer.kv_transfer_params["do_remote_prefill"] for answer in answers)
        assert info().held_transfers == len(first), "a block that is only being saved waits for no decoder"
        release(answers)
        assert info().held_transfers == 0
        for start in range(6, 60, 6):
            prefill(engine, prompts[start : start + 6], SIGNATURE_ONLY)
        assert info().held_transfers == 0
        answers = prefill(engine, first, PREFILL_LEG)
        assert_exact_behind(True, first, answers, reference)
        release(answers)
        assert (info().held_transfers, scheduler.kv_cache_manager.usage) == (0, 0.0)
