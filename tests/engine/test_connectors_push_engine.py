"""NIXL push: the prefill engine writes the KV into the blocks that the decode engine names."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from eldr.cluster.ports import free_ports
from eldr.rpc.codec import decode_state, signature_from_text
from eldr.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = Path(__file__).resolve().parents[2] / "integration/testbed/model"
PREFILL_LEG = {"do_remote_decode": True, "do_remote_prefill": False, "eldr_signature": True}
TOKENS = 8


class Pair:
    """A prefill and a decode engine, each with an engine-core process of its own that steps by itself."""

    def __init__(self) -> None:
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.channels = [grpc.insecure_channel(address) for address in self.addresses]
        self.prefill_service = prefill_pb2_grpc.PrefillServiceStub(self.channels[0])
        self.decode_service = decode_pb2_grpc.DecodeServiceStub(self.channels[1])
        self.engines: list[Any] = []

    def start(self, role: str, address: str) -> None:
        from vllm import LLM

        eldr = {"worker_id": role, "grpc_listen": address, "http_url": "http://127.0.0.1:1"}
        transfer = {
            "kv_connector": "NixlPushConnector",
            "kv_connector_module_path": "eldr.engine.connector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"eldr": eldr, "kv_lease_duration": 60},
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(1)[0]))
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
            patch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
            self.engines.append(
                LLM(
                    model=str(MODEL),
                    dtype="float32",
                    enforce_eager=True,
                    max_model_len=512,
                    max_num_seqs=16,
                    block_size=32,
                    kv_cache_memory_bytes=1 << 24,
                    kv_transfer_config=transfer,
                    disable_log_stats=False,
                )
            )

    def generate(self, engine: int, prompts: list[list[int]], tokens: int, params: list[Any]) -> list[Any]:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args={"kv_transfer_params": one}
            )
            for one in params
        ]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        return list(self.engines[engine].generate(requests, sampling, use_tqdm=False))

    def prompt_tokens(self, engine: int, source: str) -> int:
        """Prompt tokens by where their KV came from, as vLLM counts them."""
        return sum(
            int(metric.value)
            for metric in self.engines[engine].get_metrics()
            if metric.name.startswith("vllm:prompt_tokens_by_source") and metric.labels["source"] == source
        )

    def info(self) -> Any:
        return self.prefill_service.GetInfo(prefill_pb2.PrefillServiceGetInfoRequest())

    def wait_until_nothing_is_held(self) -> None:
        deadline = time.monotonic() + 30
        while (info := self.info()).held_transfers or info.kv_usage:
            assert time.monotonic() < deadline, f"{info.held_transfers} held, KV use {info.kv_usage}"
            time.sleep(0.02)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for engine in self.engines:
            engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def pair(engine_environment: None) -> Iterator[Pair]:
    started = Pair()
    try:
        for role, address in zip(("kv_producer", "kv_consumer"), started.addresses, strict=True):
            started.start(role, address)
        yield started
    finally:
        started.close()


def test_the_decoder_gets_the_kv_and_the_gateway_the_signature(
    pair: Pair, prompts: list[list[int]], reference: Any
) -> None:
    batch = prompts[:6]
    legs = pair.generate(0, batch, 1, [dict(PREFILL_LEG) for _ in batch])
    handed: list[dict[str, Any]] = []
    for ids, leg in zip(batch, legs, strict=True):
        params = dict(leg.kv_transfer_params)
        assert params["transfer_mode"] == "push"
        signature = signature_from_text(params.pop("eldr_signature"))
        assert signature.tokens == signature.covered_tokens == len(ids)
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
        handed.append({**params, "eldr_reservation_id": f"r{len(handed)}"})
    assert pair.info().held_transfers == len(batch)
    answers = pair.generate(1, batch, TOKENS, handed)
    pair.wait_until_nothing_is_held()
    # The same prompts again at the prefill engine, which computes them itself.
    expected = pair.generate(0, batch, TOKENS, [None] * len(batch))
    for answer, own in zip(answers, expected, strict=True):
        assert answer.outputs[0].token_ids == own.outputs[0].token_ids
    assert pair.prompt_tokens(1, "local_compute") == 0
    assert pair.prompt_tokens(1, "external_kv_transfer") >= sum(len(ids) - 1 for ids in batch)
    state = decode_state(pair.decode_service.GetState(decode_pb2.GetStateRequest()).state)
    assert (state.running, state.waiting, state.reservation_ids) == (0, 0, frozenset())
    assert state.totals.decode_tokens >= len(batch) * (TOKENS - 2)
    assert state.hit_frequency is not None


def test_a_transfer_that_no_decoder_asks_for_is_released(pair: Pair, prompts: list[list[int]]) -> None:
    """Case 2.2: the writer forgets it too, so that a late registration gets nothing."""
    (leg,) = pair.generate(0, prompts[10:11], 1, [dict(PREFILL_LEG)])
    assert pair.info().held_transfers == 1
    transfer = prefill_pb2.ReleaseTransferRequest(transfer_id=leg.kv_transfer_params["remote_request_id"])
    assert pair.prefill_service.ReleaseTransfer(transfer).released
    pair.wait_until_nothing_is_held()
    assert not pair.prefill_service.ReleaseTransfer(transfer).released
