"""Typed Python clients of the router and of the workers. See `docs/protocol.md`."""

from eldr.client.errors import (
    CallError,
    NoWorkerError,
    RouterError,
    RouterUnreachableError,
    WorkerError,
    WorkerUnreachableError,
)
from eldr.client.results import (
    DecisionEvent,
    DecodeReservation,
    DecodeSharesFit,
    DrainStatus,
    DriftStatus,
    FleetSnapshot,
    PolicyStatus,
    PrefillReservation,
    PrefillStatus,
    ProfileStatus,
    SignatureEvent,
    StepTimeFit,
)
from eldr.client.router_client import RouterClient
from eldr.client.worker_client import WorkerClient
from eldr.routing.contract import Candidate, Decision
from eldr.routing.state import DecoderState, DecoderTotals
from eldr.rpc.codec import CodecError
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.rpc.worker_status import WorkerHealth, WorkerRef, WorkerStatus
from eldr.signature.expert_signature import ExpertSignature

__all__ = [
    "CallError",
    "Candidate",
    "CodecError",
    "Decision",
    "DecisionEvent",
    "DecodeReservation",
    "DecodeSharesFit",
    "DecoderState",
    "DecoderTotals",
    "DrainStatus",
    "DriftStatus",
    "ExpertSignature",
    "FleetSnapshot",
    "NoWorkerError",
    "Outcome",
    "PolicyStatus",
    "PrefillReservation",
    "PrefillStatus",
    "ProfileStatus",
    "RouterClient",
    "RouterError",
    "RouterUnreachableError",
    "SignatureEvent",
    "StepTimeFit",
    "WorkerClient",
    "WorkerError",
    "WorkerHealth",
    "WorkerInfo",
    "WorkerRef",
    "WorkerRole",
    "WorkerStatus",
    "WorkerUnreachableError",
]
