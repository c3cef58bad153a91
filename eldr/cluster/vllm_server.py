"""The command line and environment of one vLLM 0.32.0 server, on this machine's CPU and loopback interface."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from eldr.cluster.errors import ConfigError
from eldr.cluster.ports import LOOPBACK
from eldr.cluster.supervisor import Command

DTYPES = ("float32", "bfloat16", "float16", "auto")
MIB = 1024 * 1024


class Leg(StrEnum):
    """What a server does of a request; `WHOLE` is an ordinary server without a connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


_KV_ROLES = {Leg.PREFILL: "kv_producer", Leg.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the servers of one fleet share. Raises ConfigError where a field is out of range.

    `kv_cache_mib` is the size of the KV cache per server, `block_size` the tokens of one KV block.
    `state_period_s` is the longest time between two reports of a decoder.
    """

    model: str
    served_name: str = "m"
    dtype: str = "float32"
    max_model_len: int = 1024
    max_num_seqs: int = 64
    block_size: int = 32
    kv_cache_mib: int = 256
    state_period_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must not be empty")
        if not self.served_name:
            raise ConfigError("served_name must not be empty")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("max_model_len", "max_num_seqs", "block_size", "kv_cache_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.state_period_s > 0:
            raise ConfigError(f"state_period_s must be positive, got {self.state_period_s}")


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One server: its leg, its loopback ports and its core.

    `core` is the CPU that the worker's one thread is bound to, None to leave the thread unbound.
    `grpc_port`, `nixl_port`, `routers` and `connector_config` (further keys of the connector's extra config)
    concern prefill and decode servers only.
    """

    name: str
    leg: Leg
    settings: EngineSettings
    http_port: int
    grpc_port: int = 0
    nixl_port: int = 0
    core: int | None = None
    routers: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    connector_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needed = ("http_port",) if self.leg is Leg.WHOLE else ("http_port", "grpc_port", "nixl_port")
        for name in needed:
            if not 1 <= getattr(self, name) <= 65_535:
                raise ConfigError(f"{self.name}: {name} must be 1 to 65535, got {getattr(self, name)}")

    @property
    def http_url(self) -> str:
        """Where its OpenAI-compatible server listens."""
        return f"http://{LOOPBACK}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """Where its PrefillService or DecodeService listens."""
        return f"{LOOPBACK}:{self.grpc_port}"

    def command(self) -> Command:
        """What starts it. The module is run directly: `vllm serve` wants a distribution named vllm."""
        settings = self.settings
        argv = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            f"--model={settings.model}",
            f"--served-model-name={settings.served_name}",
            f"--host={LOOPBACK}",
            f"--port={self.http_port}",
            f"--dtype={settings.dtype}",
            f"--max-model-len={settings.max_model_len}",
            f"--max-num-seqs={settings.max_num_seqs}",
            f"--block-size={settings.block_size}",
            f"--kv-cache-memory-bytes={settings.kv_cache_mib * MIB}",
            "--enforce-eager",
            "--disable-uvicorn-access-log",
        ]
        if self.leg is not Leg.WHOLE:
            argv.append(f"--kv-transfer-config={json.dumps(self.kv_transfer_config())}")
        return Command(self.name, (*argv, *self.extra_args), {**self._env(), **self.extra_env})

    def kv_transfer_config(self) -> dict[str, Any]:
        """The value of --kv-transfer-config."""
        return {
            "kv_connector": "EldrConnector",
            "kv_connector_module_path": "eldr.engine.connector",
            "kv_role": _KV_ROLES[self.leg],
            "kv_buffer_device": "cpu",
            # A decoder whose KV does not come, or came too late, computes the prompt itself.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "eldr": {
                    "worker_id": self.name,
                    "grpc_listen": self.grpc_address,
                    "http_url": self.http_url,
                    "state_period_s": self.settings.state_period_s,
                    "routers": list(self.routers),
                },
                **self.connector_config,
            },
        }

    def _env(self) -> dict[str, str]:
        env = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": LOOPBACK,
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if self.core is None else str(self.core),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": "1",
        }
        if self.leg is not Leg.WHOLE:
            env |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.nixl_port),
                "UCX_TLS": "tcp,self,sm",
                "UCX_NET_DEVICES": "lo",
            }
        return env
