"""Frozen answers of the router and of the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from eldr.routing.contract import Decision
from eldr.rpc.worker_info import WorkerInfo
from eldr.rpc.worker_status import WorkerRef, WorkerStatus
from eldr.signature.expert_signature import ExpertSignature


@dataclass(frozen=True, slots=True)
class PrefillReservation:
    """A booked prefill worker. The booking is dropped after `expires_in_s` unless it is released before."""

    reservation_id: str
    worker: WorkerRef
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class DecodeReservation:
    """A booked decode worker and why it was picked.

    The booking is dropped after `expires_in_s` unless the decoder's reports carry it.
    """

    reservation_id: str
    worker: WorkerRef
    decision: Decision
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """Step-time model of one group of decoders; `error` is the recent mean of |observed / predicted - 1|."""

    group: str
    observations: int
    outliers: int
    error: float


@dataclass(frozen=True, slots=True)
class DecodeSharesFit:
    """Predictor of decode shares. Errors are root mean squares of a share: in force, and of counts / tokens."""

    observations: int = 0
    learned: bool = False
    error: float = 0.0
    plain_error: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """The policy in force, its options, the names that `set_policy` takes now, and how well the models fit."""

    policy: str
    options: Mapping[str, float]
    available: tuple[str, ...] = ()
    step_times: tuple[StepTimeFit, ...] = ()
    decode_shares: DecodeSharesFit = DecodeSharesFit()


@dataclass(frozen=True, slots=True)
class ProfileStatus:
    """The fitted profile in force. All else is empty where `loaded` is False."""

    loaded: bool
    fingerprint: str = ""
    transform: str = ""
    clusters: int = 0
    layer_mask: tuple[int, ...] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """How far live traffic is from the profile's calibration, as last measured `age_s` ago; see `docs/drift.md`.

    All but `reason` is empty where `measured` is False. `rho` is None where no decode counts are known.
    """

    measured: bool
    reason: str
    signatures: int = 0
    age_s: float = 0.0
    outside_ratio: float = 0.0
    distance_ks: float = 0.0
    distance_median: float = 0.0
    calibration_distance_median: float = 0.0
    occupancy: tuple[float, ...] = ()
    occupancy_tv: float = 0.0
    refit_pays: bool = False
    rho: float | None = None


@dataclass(frozen=True, slots=True)
class DecisionEvent:
    """One decision as it was made, how long it took, and how many events were lost before it."""

    reservation_id: str
    decision: Decision
    seconds: float
    dropped: int


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The whole fleet; `generation` grows with every change of membership or health."""

    generation: int
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class PrefillStatus:
    """A prefill worker: requests whose KV blocks wait for a decoder, and the used share of its KV blocks."""

    info: WorkerInfo
    held_transfers: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class SignatureEvent:
    """A finished prompt of a prefill worker, and how many events were lost before it."""

    transfer_id: str
    signature: ExpertSignature
    dropped: int


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """What a draining worker still has to do."""

    running: int
    waiting: int
