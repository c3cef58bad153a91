"""A prefill engine in this process, and the independent reference."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eldr.cluster.ports import free_ports

TESTBED = Path(__file__).resolve().parents[2] / "integration/testbed"


@pytest.fixture(scope="session")
def engine_environment() -> Iterator[None]:
    """What vLLM's CPU engine needs to run alone on the loopback."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def prompts(engine_environment: None) -> list[list[int]]:
    """Token ids of evaluation prompts of many domains, 40 to 300 tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TESTBED / "model")
    lines = (TESTBED / "prompts/evaluation.jsonl").read_text(encoding="utf-8").splitlines()[:120]
    encoded = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return [ids[: 40 + 17 * i % 260] for i, ids in enumerate(encoded)]


@pytest.fixture(scope="session")
def reference(engine_environment: None) -> Any:
    from integration.reference.hf_counts import HfReference

    return HfReference(TESTBED / "model")


@pytest.fixture(scope="module")
def make_engine(engine_environment: None) -> Iterator[Callable[..., Any]]:
    """Makes prefill engines with eldr's connector; the last one is shut down before the next starts.

    `eldr` and `extra` are keys of eldr's and of the connector's own configuration, `transfer` of
    --kv-transfer-config; everything else goes to LLM.
    """
    from vllm import LLM

    running: list[Any] = []

    def end() -> None:
        while running:
            running.pop().llm_engine.engine_core.shutdown()

    def make(**settings: Any) -> Any:
        end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(1)[0]))
            eldr = {
                "worker_id": "prefill-0",
                "grpc_listen": f"127.0.0.1:{free_ports(1)[0]}",
                "http_url": "http://127.0.0.1:1",
                **settings.pop("eldr", {}),
            }
            transfer = {
                "kv_connector": "EldrConnector",
                "kv_connector_module_path": "eldr.engine.connector",
                "kv_role": "kv_producer",
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"eldr": eldr, **settings.pop("extra", {})},
                **settings.pop("transfer", {}),
            }
            defaults = {
                "model": str(TESTBED / "model"),
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": 512,
                "max_num_seqs": 16,
                "block_size": 32,
                "kv_cache_memory_bytes": 1 << 24,
                "kv_transfer_config": transfer,
                "disable_log_stats": False,
            }
            engine = LLM(**{**defaults, **settings})
        running.append(engine)
        return engine

    yield make
    end()
