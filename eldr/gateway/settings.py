"""Timeouts and limits of the gateway."""

from dataclasses import dataclass, fields

KV_LEASE_S = 30.0
"""How long vLLM's NIXL connector keeps the KV of a prompt for a decoder that has not asked yet."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All times in seconds. Raises ValueError that names field, value and range."""

    connect_timeout_s: float = 5.0
    """For a connection to a worker, the wait for a free one of `connections_per_worker` included."""
    prefill_timeout_s: float = 120.0
    """For the whole prefill leg, its time in the worker's queue included."""
    handoff_timeout_s: float = 15.0
    """From the prefill reply to the start of the decode leg; inside the KV lease."""
    first_token_timeout_s: float = 120.0
    """From the start of a streaming decode leg to its first event."""
    idle_timeout_s: float = 120.0
    """Between two chunks of a stream."""
    decode_timeout_s: float = 600.0
    """For a whole decode leg that does not stream."""
    attempts: int = 3
    """Decode legs that are tried for one request, the first included."""
    connections_per_worker: int = 512
    """Legs at one worker at a time; the next ones wait `connect_timeout_s`, then go elsewhere."""
    breaker_failures: int = 5
    """Failures in a row after which a worker gets no request for a while."""
    breaker_open_s: float = 5.0
    """How long that is; doubled at each failed probe, up to eight times."""
    probe_after_s: float = 10.0
    """Silence of a worker after which its health is asked for."""
    max_body_bytes: int = 16 * 1024 * 1024
    read_timeout_s: float = 30.0
    """For a client to send its body."""
    max_requests: int = 4096
    """Requests that run at a time; more wait."""
    max_waiting: int = 4096
    tenant_requests: int = 4096
    """Of one tenant: the bearer token, or the header that `tenant_header` names."""
    tenant_waiting: int = 1024
    queue_timeout_s: float = 30.0
    """Longest wait for a turn."""
    tenant_header: str = ""
    """Trusted header that names the tenant: set by a proxy, never by clients. Empty for none."""
    ordinary_fallback: bool = False
    """Whether one decode worker serves alone what two legs cannot, instead of a 400."""
    first_token_from_prefill: bool = False
    """Whether the token that prefill samples goes to the client before the decoder is chosen."""
    learn_share: float = 0.0
    """Of the requests, from whose decode counts the router's predictor learns."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(entry.default, (bool, str)):
                continue
            low, high = (1, float("inf")) if isinstance(entry.default, int) else (0.001, float("inf"))
            if entry.name == "handoff_timeout_s":
                high = KV_LEASE_S * 2 / 3
            if entry.name == "learn_share":
                low, high = 0, 1
            if not low <= value <= high:
                raise ValueError(f"{entry.name} must be {low:g} to {high:g}, got {value}")
