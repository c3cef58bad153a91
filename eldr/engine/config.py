"""Settings of the engine side: the mapping `eldr` in the connector's extra config."""

import difflib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eldr.rpc.calling import Caller
from eldr.rpc.security import Tls, TlsError, TlsFiles, tls_from
from eldr.rpc.serving import Gate
from eldr.rpc.tokens import Role, TokenError, TokenFile, TokenTable


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
    tls: files of this worker's gRPC port and of its calls to routers and other workers, see TlsFiles.
    token_file: token that this worker shows to routers and other workers.
    accept_tokens: role (worker, client, admin) to the file of the tokens that this worker takes for it; empty
        lets everybody in.
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
    tls: TlsFiles | None = None
    token_file: Path | None = None
    accept_tokens: Mapping[Role, Path] = field(default_factory=dict)
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

    def caller(self) -> Caller:
        """How this worker calls others. Raises EngineConfigError where a file cannot be used."""
        return Caller(self._tls(), self._shown())

    def gate(self) -> Gate:
        """How this worker's gRPC port lets callers in. Raises EngineConfigError where a file cannot be used."""
        tls = self._tls()
        if tls is not None and tls.files.cert is None:
            raise EngineConfigError("eldr.tls needs cert and key: this worker serves a gRPC port")
        if not self.accept_tokens:
            return Gate(tls)
        try:
            return Gate(tls, TokenTable({role: TokenFile(path) for role, path in self.accept_tokens.items()}))
        except TokenError as error:
            raise EngineConfigError(f"eldr.accept_tokens: {error}") from error

    def _tls(self) -> Tls | None:
        try:
            return None if self.tls is None else Tls(self.tls)
        except TlsError as error:
            raise EngineConfigError(f"eldr.tls: {error}") from error

    def _shown(self) -> TokenFile | None:
        try:
            return None if self.token_file is None else TokenFile(self.token_file, shows=True)
        except TokenError as error:
            raise EngineConfigError(f"eldr.token_file: {error}") from error

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
        settings.update(_security(settings))
        try:
            return cls(**settings)
        except TypeError as error:
            raise EngineConfigError(f"kv_connector_extra_config.eldr: {error}") from error


def _security(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys `tls`, `token_file` and `accept_tokens`, those that are there, in their types."""
    found: dict[str, Any] = {}
    try:
        if settings.get("tls") is not None:
            found["tls"] = tls_from(settings["tls"])
    except TlsError as error:
        raise EngineConfigError(f"eldr.tls: {error}") from error
    if settings.get("token_file") is not None:
        found["token_file"] = _path("token_file", settings["token_file"])
    accepted = settings.get("accept_tokens")
    if accepted is not None:
        roles = [role.value for role in Role]
        if not isinstance(accepted, Mapping) or not set(accepted) <= set(roles):
            raise EngineConfigError(f"eldr.accept_tokens must be a mapping of {', '.join(roles)} to files")
        found["accept_tokens"] = {
            Role(role): _path(f"accept_tokens.{role}", path) for role, path in accepted.items()
        }
    return found


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise EngineConfigError(f"eldr.{name} must be a path, got {type(value).__name__}")
    return Path(value)
