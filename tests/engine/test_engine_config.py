"""Settings of the engine side are checked at start."""

from typing import Any

import pytest

from eldr.engine.config import EngineConfig, EngineConfigError

GOOD = {"worker_id": "d0", "grpc_listen": "127.0.0.1:9301", "http_url": "http://127.0.0.1:8101"}


def test_defaults_and_a_single_router_as_text() -> None:
    config = EngineConfig.from_extra_config({"eldr": {**GOOD, "routers": "127.0.0.1:7700"}, "num_threads": 0})
    assert config.routers == ("127.0.0.1:7700",)
    assert config.state_period_s == 0.5
    assert config.incarnation != EngineConfig.from_extra_config({"eldr": GOOD}).incarnation


def test_a_missing_mapping_says_what_is_needed() -> None:
    with pytest.raises(EngineConfigError, match="worker_id, grpc_listen and http_url"):
        EngineConfig.from_extra_config({})


@pytest.mark.parametrize(
    "key", [*GOOD, "routers", "state_period_s", "hit_window_steps", "nixl_progress_delay_us"]
)
def test_a_typo_in_any_key_is_refused_with_a_suggestion(key: str) -> None:
    """Case 7.2."""
    typo = key[:-1] + "q"
    with pytest.raises(EngineConfigError, match=f"unknown key eldr.{typo}, did you mean '{key}'"):
        EngineConfig.from_extra_config({"eldr": {**GOOD, typo: 1}})


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(EngineConfigError, match=f"lacks {key}"):
        EngineConfig.from_extra_config({"eldr": {k: v for k, v in GOOD.items() if k != key}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("grpc_listen", "9301"),
        ("grpc_listen", "host:port"),
        ("grpc_listen", "host:70000"),
        ("http_url", "127.0.0.1:8101"),
        ("worker_id", ""),
        ("state_period_s", 0),
        ("state_period_s", float("nan")),
        ("hit_window_steps", 0),
        ("recent_signatures", -1),
        ("state_min_gap_s", "soon"),
    ],
)
def test_a_value_out_of_range_is_named(key: str, value: Any) -> None:
    with pytest.raises(EngineConfigError, match=key if value != "soon" else "eldr"):
        EngineConfig.from_extra_config({"eldr": {**GOOD, key: value}})
