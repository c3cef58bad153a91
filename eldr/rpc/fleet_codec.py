"""Messages of the fleet and of bookings against domain types. Raises CodecError on anything malformed."""

import dataclasses

from eldr.rpc.codec import CodecError, decode_state, decode_worker_info, encode_state, encode_worker_info
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerInfo
from eldr.rpc.worker_status import WorkerHealth, WorkerRef, WorkerStatus
from eldr.v1 import fleet_pb2, routing_pb2


def encode_outcome(outcome: Outcome) -> str:
    """Domain to the enum's name, which message constructors take."""
    return f"OUTCOME_{outcome.name}"


def decode_outcome(number: int) -> Outcome:
    """Message to domain; an unset or unknown outcome is an error."""
    name = routing_pb2.Outcome.Name(number) if number in routing_pb2.Outcome.values() else ""
    try:
        return Outcome[name.removeprefix("OUTCOME_")]
    except KeyError:
        known = ", ".join(Outcome)
        raise CodecError(f"outcome: must be one of {known}, got {name or number}") from None


def encode_worker_ref(info: WorkerInfo) -> routing_pb2.WorkerRef:
    """The part of a worker's info that a caller needs to send it a leg."""
    return routing_pb2.WorkerRef(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        http_url=info.http_url,
        grpc_address=info.grpc_address,
    )


def decode_worker_ref(message: routing_pb2.WorkerRef) -> WorkerRef:
    """Message to domain."""
    return WorkerRef(message.worker_id, message.incarnation, message.http_url, message.grpc_address)


def encode_worker_status(status: WorkerStatus) -> fleet_pb2.Worker:
    """Domain to message; hit frequencies are left out."""
    state = status.state
    return fleet_pb2.Worker(
        info=encode_worker_info(status.info),
        health=f"WORKER_HEALTH_{status.health.name}",
        bookings=status.bookings,
        state_age_s=status.state_age_s,
        state=encode_state(dataclasses.replace(state, hit_frequency=None)) if state else None,
        reason=status.reason,
    )


def decode_worker_status(message: fleet_pb2.Worker) -> WorkerStatus:
    """Message to domain."""
    name = (
        fleet_pb2.WorkerHealth.Name(message.health)
        if message.health in fleet_pb2.WorkerHealth.values()
        else ""
    )
    try:
        health = WorkerHealth[name.removeprefix("WORKER_HEALTH_")]
    except KeyError:
        raise CodecError(
            f"worker {message.info.worker_id}: unknown health {name or message.health}"
        ) from None
    return WorkerStatus(
        info=decode_worker_info(message.info),
        health=health,
        bookings=message.bookings,
        state_age_s=message.state_age_s,
        state=decode_state(message.state) if message.HasField("state") else None,
        reason=message.reason,
    )
