"""Settings of the router, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eldr.router.addresses import AllowedAddresses
from eldr.router.discovery import DnsName
from eldr.router.fleet import HealthLimits
from eldr.routing.registry import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`workers` are host:port addresses of gRPC services to dial; others register themselves.

    Raises ValueError that names the field, the value and the range.
    """

    policy: str = DEFAULT_POLICY
    policy_options: Mapping[str, float] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    discover: tuple[str, ...] = ()
    """`dns:///name:port` of headless services whose records are workers."""
    discover_period_s: float = 5.0
    drain_limit_s: float = 300.0
    """Time that a draining worker gets where the caller names none."""
    health: HealthLimits = field(default_factory=HealthLimits)
    reservation_ttl_s: float = 30.0
    """Life of a decode booking that no report carries: the lease of the KV blocks it waits for."""
    prefill_ttl_s: float = 120.0
    min_coverage: float = 0.5
    """Least covered share of a prompt's tokens for its signature to steer."""
    report_period_s: float = 0.5
    probe_period_s: float = 1.0
    seed: int = 0
    reflection: bool = False
    allow_workers: tuple[str, ...] = ()
    """Networks and globs of host names that a worker's addresses must match; empty allows all."""
    registrations_per_s: float = 100.0
    """Registrations that one host may make; each of its workers makes one a second."""

    def __post_init__(self) -> None:
        AllowedAddresses(self.allow_workers)
        for name in (
            "reservation_ttl_s",
            "prefill_ttl_s",
            "report_period_s",
            "probe_period_s",
            "registrations_per_s",
            "discover_period_s",
            "drain_limit_s",
        ):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, got {value:g}")
        if not 0 <= self.min_coverage <= 1:
            raise ValueError(f"min_coverage must be 0 to 1, got {self.min_coverage:g}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be 0 to 2^64 - 1, got {self.seed}")
        for name in ("report_period_s", "probe_period_s"):
            if getattr(self, name) >= self.health.stale_s:
                raise ValueError(
                    f"{name} must be below stale_s ({self.health.stale_s:g}), got {getattr(self, name):g}: "
                    "healthy workers would go stale between two signs of life"
                )
        for text in self.discover:
            DnsName.parse(text)
        for address in self.workers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
                raise ValueError(f"workers must be host:port, got {address!r}")
