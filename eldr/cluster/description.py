"""A fleet on this machine, described in one YAML file."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from eldr.cluster.errors import ConfigError
from eldr.cluster.local import FleetConfig
from eldr.cluster.vllm_server import EngineSettings

MAX_BYTES = 1 << 20
_FLEET = ("prefill", "decode", "cores", "start_together", "start_timeout_s", "prefill_args", "decode_args")
_ENGINE = tuple(field.name for field in fields(EngineSettings) if field.name != "model")
_SERVICE = ("port", "args")
_KEYS = ("model", "work_dir", "engine", "router", "gateway", *_FLEET)


@dataclass(frozen=True, slots=True)
class Description:
    """The fleet, the further words of `eldr router` and `eldr gateway`, and the folder of logs and state."""

    fleet: FleetConfig
    router_args: tuple[str, ...]
    gateway_args: tuple[str, ...]
    work_dir: Path


def load_description(path: Path) -> Description:
    """Reads a cluster file; relative paths in it are relative to its folder.

    Raises ConfigError that names the file, the key and what is wrong with it.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes")
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return _description(_section(raw, "the file", _KEYS), path.resolve().parent)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _description(raw: Mapping[str, Any], base: Path) -> Description:
    model = raw.get("model")
    if not isinstance(model, str) or not model:
        raise ConfigError("model must be a folder or the name of a model")
    engine = _section(raw.get("engine") or {}, "engine", _ENGINE)
    router = _section(raw.get("router") or {}, "router", _SERVICE)
    gateway = _section(raw.get("gateway") or {}, "gateway", _SERVICE)
    fleet = {key: raw[key] for key in _FLEET if key in raw}
    for key in ("prefill_args", "decode_args"):
        if key in fleet:
            fleet[key] = _words(fleet[key], key)
    if "cores" in fleet:
        fleet["cores"] = tuple(fleet["cores"])
    local = base / model
    return Description(
        FleetConfig(
            EngineSettings(str(local) if local.exists() else model, **engine),
            router_port=router.get("port", 0),
            gateway_port=gateway.get("port", 0),
            **fleet,
        ),
        _words(router.get("args", []), "router.args"),
        _words(gateway.get("args", []), "gateway.args"),
        base / str(raw.get("work_dir", "eldr-cluster")),
    )


def _section(raw: object, name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{name} must be a mapping, got {type(raw).__name__}")
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{name} has an unknown key {key!r}; {hint}")
    return raw


def _words(raw: object, name: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise ConfigError(f"{name} must be a list of strings")
    return tuple(raw)
