"""The command line of a vLLM server says what its leg needs."""

import json
import sys

import pytest

from eldr.cluster import ConfigError, EngineSettings, Leg, VllmServer

SETTINGS = EngineSettings("models/testbed", kv_cache_mib=64)


def server(leg, **changes):
    fields = {"name": f"{leg}-0", "leg": leg, "settings": SETTINGS, "http_port": 8100}
    if leg is not Leg.WHOLE:
        fields |= {"grpc_port": 9300, "nixl_port": 5600, "routers": ("127.0.0.1:7700",)}
    return VllmServer(**(fields | changes))


def transfer_config(command):
    (word,) = [word for word in command.argv if word.startswith("--kv-transfer-config=")]
    return json.loads(word.partition("=")[2])


@pytest.mark.parametrize(("leg", "role"), [(Leg.PREFILL, "kv_producer"), (Leg.DECODE, "kv_consumer")])
def test_a_leg_runs_the_eldr_connector_in_its_role(leg, role):
    assert transfer_config(server(leg).command()) == {
        "kv_connector": "EldrConnector",
        "kv_connector_module_path": "eldr.engine.connector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "eldr": {
                "worker_id": f"{leg}-0",
                "grpc_listen": "127.0.0.1:9300",
                "http_url": "http://127.0.0.1:8100",
                "state_period_s": 0.5,
                "routers": ["127.0.0.1:7700"],
            }
        },
    }


def test_an_ordinary_server_has_no_connector_and_no_side_channel():
    command = server(Leg.WHOLE).command()
    assert not [word for word in command.argv if "kv-transfer" in word]
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in command.env


def test_settings_become_flags_of_this_interpreter():
    command = server(Leg.DECODE, extra_args=("--max-num-batched-tokens=64",)).command()
    assert command.argv[0] == sys.executable
    for word in (
        "--model=models/testbed",
        "--port=8100",
        "--dtype=float32",
        "--block-size=32",
        "--kv-cache-memory-bytes=67108864",
        "--enforce-eager",
        "--max-num-batched-tokens=64",
    ):
        assert word in command.argv


def test_a_server_is_bound_to_its_core_or_to_none():
    assert server(Leg.DECODE, core=1).command().env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert server(Leg.DECODE).command().env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_extra_variables_win():
    extra = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    assert server(Leg.DECODE, core=0, extra_env=extra).command().env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("served_name", ""),
        ("dtype", "int8"),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("kv_cache_mib", 0),
        ("max_model_len", -1),
        ("state_period_s", 0.0),
        ("state_period_s", float("nan")),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        EngineSettings(**({"model": "m"} | {field: value}))


def test_a_leg_without_its_ports_is_refused_by_name():
    with pytest.raises(ConfigError, match="decode-0: nixl_port"):
        server(Leg.DECODE, nixl_port=0)
