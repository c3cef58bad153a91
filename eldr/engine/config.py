"""Settings of the engine side: the mapping `eldr` in the connector's extra config."""

import difflib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class EngineConfigError(ValueError):
    """A setting that is unknown, missing or out of range. Stops the engine at start."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`kv_connector_extra_config["eldr"]`.

    worker_id: stable name of this worker, unique in the fleet.
    grpc_listen: host:port on which this worker serves PrefillService or DecodeService.
    http_url: where this engine's OpenAI-compatible server listens, as seen by the gateway.
    routers: routers to register with; empty where routers have this worker in their static list.
    state_period_s: longest time between two state reports.
    state_min_gap_s: shortest time between two state reports.
    hit_window_steps: window of the hit frequencies, in decode steps (exponential, 1 / window per step).
    recent_signatures: signatures kept for `PrefillService.GetSignature`, and decode counts for
        `DecodeService.GetDecodeCounts`.
    max_tracked_requests: requests whose decode picks may be counted at the same time.
    nixl_progress_delay_us: pause of NIXL's progress thread; -1 leaves NIXL as it is. On a CPU engine the
        default keeps the thread from spinning a whole core.
    """

    worker_id: str
    grpc_listen: str
    http_url: str
    routers: tuple[str, ...] = ()
    state_period_s: float = 0.5
    state_min_gap_s: float = 0.05
    hit_window_steps: int = 16
    recent_signatures: int = 1024
    max_tracked_requests: int = 256
    nixl_progress_delay_us: int | None = None
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("worker_id", "grpc_listen", "http_url"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise EngineConfigError(f"eldr.{name} must be a text that is not empty")
        host, colon, port = self.grpc_listen.rpartition(":")
        if not (host and colon and port.isdigit() and int(port) < 65536):
            raise EngineConfigError(f"eldr.grpc_listen must be host:port, got {self.grpc_listen!r}")
        if not self.http_url.startswith(("http://", "https://")):
            raise EngineConfigError(
                f"eldr.http_url must start with http:// or https://, got {self.http_url!r}"
            )
        for name, low in (
            ("state_period_s", 0.01),
            ("state_min_gap_s", 0.0),
            ("hit_window_steps", 1),
            ("recent_signatures", 0),
            ("max_tracked_requests", 0),
        ):
            if not getattr(self, name) >= low:
                raise EngineConfigError(f"eldr.{name} must be at least {low}, got {getattr(self, name)}")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "EngineConfig":
        """Reads the mapping `eldr`; raises EngineConfigError that names the key and what to do."""
        raw = extra.get("eldr")
        if not isinstance(raw, Mapping):
            raise EngineConfigError(
                'kv_connector_extra_config needs a mapping "eldr" with worker_id, grpc_listen and http_url'
            )
        known = [f.name for f in fields(cls) if f.name != "incarnation"]
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f", did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise EngineConfigError(f"unknown key eldr.{key}{hint}")
        missing = [name for name in ("worker_id", "grpc_listen", "http_url") if name not in raw]
        if missing:
            raise EngineConfigError(f"kv_connector_extra_config.eldr lacks {', '.join(missing)}")
        settings = dict(raw)
        if isinstance(settings.get("routers"), str):
            settings["routers"] = [settings["routers"]]
        settings["routers"] = tuple(settings.get("routers", ()))
        try:
            return cls(**settings)
        except TypeError as error:
            raise EngineConfigError(f"kv_connector_extra_config.eldr: {error}") from error
