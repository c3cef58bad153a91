"""The one place where protobuf messages and domain types meet. Raises CodecError on anything malformed."""

import base64
import binascii
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from eldr.routing.contract import Candidate, Decision, DecodeRequest
from eldr.routing.state import DecoderState, DecoderTotals, StateError
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import GeometryError, ModelGeometry
from eldr.v1 import decode_pb2, routing_pb2, signature_pb2, worker_pb2

SCHEMA_VERSION = 1
MAX_COUNTS = 1 << 24
"""Largest layers * experts that is decoded, so that a small message cannot ask for much memory."""

SPARSE = 0.25
"""Share of counts above 0 below which a signature is compressed."""

_DTYPES: dict[int, np.dtype[Any]] = {
    signature_pb2.COUNT_WIDTH_U8: np.dtype("<u1"),
    signature_pb2.COUNT_WIDTH_U16: np.dtype("<u2"),
    signature_pb2.COUNT_WIDTH_U32: np.dtype("<u4"),
}


class CodecError(ValueError):
    """A message that does not describe a valid value."""


def encode_geometry(geometry: ModelGeometry) -> signature_pb2.ModelGeometry:
    """Domain to message."""
    return signature_pb2.ModelGeometry(
        moe_layers=geometry.moe_layers,
        experts=geometry.experts,
        top_k=geometry.top_k,
        fingerprint=geometry.fingerprint,
    )


def decode_geometry(message: signature_pb2.ModelGeometry) -> ModelGeometry:
    """Message to domain."""
    size = len(message.moe_layers) * message.experts
    if size > MAX_COUNTS:
        raise CodecError(f"geometry: layers * experts must be at most {MAX_COUNTS}, got {size}")
    try:
        return ModelGeometry(tuple(message.moe_layers), message.experts, message.top_k, message.fingerprint)
    except GeometryError as error:
        raise CodecError(f"geometry: {error}") from error


def encode_signature(signature: ExpertSignature) -> signature_pb2.ExpertSignature:
    """Packs counts in the narrowest integer that holds the largest.

    Compressed where most counts are 0: elsewhere a third fewer bytes would cost half of a decision's time.
    """
    largest = int(signature.counts.max())
    width = (
        signature_pb2.COUNT_WIDTH_U8
        if largest < 1 << 8
        else signature_pb2.COUNT_WIDTH_U16
        if largest < 1 << 16
        else signature_pb2.COUNT_WIDTH_U32
    )
    plain = signature.counts.astype(_DTYPES[width]).tobytes()
    sparse = np.count_nonzero(signature.counts) < SPARSE * signature.counts.size
    packed = zlib.compress(plain, 1) if sparse else plain
    smaller = len(packed) < len(plain)
    layers, experts = signature.shape
    return signature_pb2.ExpertSignature(
        schema_version=SCHEMA_VERSION,
        fingerprint=signature.fingerprint,
        layers=layers,
        experts=experts,
        top_k=signature.top_k,
        tokens=signature.tokens,
        covered_tokens=signature.covered_tokens,
        width=width,
        compression=signature_pb2.COMPRESSION_ZLIB if smaller else signature_pb2.COMPRESSION_NONE,
        counts=packed if smaller else plain,
    )


def decode_signature(message: signature_pb2.ExpertSignature) -> ExpertSignature:
    """Unpacks and checks a signature, token conservation included."""
    if message.schema_version != SCHEMA_VERSION:
        raise CodecError(
            f"signature: schema_version {message.schema_version}, this side knows {SCHEMA_VERSION}"
        )
    if message.width not in _DTYPES:
        raise CodecError(f"signature: unknown count width {message.width}")
    dtype = _DTYPES[message.width]
    size = message.layers * message.experts
    if not 0 < size <= MAX_COUNTS:
        raise CodecError(f"signature: layers * experts must be 1 to {MAX_COUNTS}, got {size}")
    plain = _inflate(message, size * dtype.itemsize)
    counts = np.frombuffer(plain, dtype).reshape(message.layers, message.experts)
    try:
        return ExpertSignature(
            message.fingerprint,
            message.top_k,
            message.tokens,
            message.covered_tokens,
            counts,
        )
    except SignatureError as error:
        raise CodecError(f"signature: {error}") from error


def _inflate(message: signature_pb2.ExpertSignature, size_bytes: int) -> bytes:
    if message.compression == signature_pb2.COMPRESSION_NONE:
        plain = message.counts
    elif message.compression == signature_pb2.COMPRESSION_ZLIB:
        try:
            plain = zlib.decompressobj().decompress(message.counts, size_bytes + 1)
        except zlib.error as error:
            raise CodecError(f"signature: counts do not decompress: {error}") from error
    else:
        raise CodecError(f"signature: unknown compression {message.compression}")
    if len(plain) != size_bytes:
        raise CodecError(f"signature: counts hold {len(plain)} bytes, expected {size_bytes}")
    return plain


def signature_to_text(signature: ExpertSignature) -> str:
    """The form in `kv_transfer_params["eldr_signature"]`: base64 of the protobuf bytes."""
    return base64.b64encode(encode_signature(signature).SerializeToString()).decode("ascii")


def signature_message_from_text(text: str) -> signature_pb2.ExpertSignature:
    """The message behind `signature_to_text`, not yet unpacked."""
    if not isinstance(text, str):
        raise CodecError(f"signature: expected base64 text, got {type(text).__name__}")
    try:
        message = signature_pb2.ExpertSignature()
        message.ParseFromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError, ValueError) as error:
        raise CodecError(f"signature: not base64 of a signature message: {error}") from error
    return message


def signature_from_text(text: str) -> ExpertSignature:
    """Inverse of `signature_to_text`."""
    return decode_signature(signature_message_from_text(text))


_ROLES = {
    WorkerRole.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


def encode_worker_info(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    """Domain to message."""
    return worker_pb2.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLES[info.role],
        http_url=info.http_url,
        grpc_address=info.grpc_address,
        geometry=encode_geometry(info.geometry),
        served_model=info.served_model,
        block_size=info.block_size,
        engine_version=info.engine_version,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        kv_layout=info.kv_layout,
        hit_window_steps=info.hit_window_steps,
    )


def decode_worker_info(message: worker_pb2.WorkerInfo) -> WorkerInfo:
    """Message to domain."""
    if message.role not in _ROLES_BACK:
        raise CodecError(f"worker: role must be prefill or decode, got {message.role}")
    try:
        return WorkerInfo(
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            role=_ROLES_BACK[message.role],
            http_url=message.http_url,
            grpc_address=message.grpc_address,
            geometry=decode_geometry(message.geometry),
            served_model=message.served_model,
            block_size=message.block_size,
            engine_version=message.engine_version,
            max_model_len=message.max_model_len,
            max_num_seqs=message.max_num_seqs,
            kv_layout=message.kv_layout,
            hit_window_steps=message.hit_window_steps,
        )
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"worker: {error}") from error


def quantise_frequency(hit_frequency: npt.NDArray[np.float32]) -> bytes:
    """Probabilities [layers, experts] to one byte each, rounded to the nearest 1/255."""
    quantised: npt.NDArray[np.uint8] = np.rint(np.clip(hit_frequency, 0.0, 1.0) * 255.0).astype(np.uint8)
    return quantised.tobytes()


def encode_state(state: DecoderState) -> decode_pb2.DecoderState:
    """Domain to message."""
    hit = state.hit_frequency
    totals = state.totals
    return decode_pb2.DecoderState(
        worker_id=state.worker_id,
        incarnation=state.incarnation,
        sequence=state.sequence,
        age_s=state.age_s,
        running=state.running,
        waiting=state.waiting,
        kv_usage=state.kv_usage,
        kv_tokens=state.kv_tokens,
        step_time_ewma_s=state.step_time_ewma_s,
        step_time_last_s=state.step_time_last_s,
        batch_last=state.batch_last,
        union_last=state.union_last,
        hit_frequency=b"" if hit is None else quantise_frequency(hit),
        layers=0 if hit is None else hit.shape[0],
        experts=0 if hit is None else hit.shape[1],
        reservation_ids=sorted(state.reservation_ids),
        draining=state.draining,
        placement_version=state.placement_version,
        totals=decode_pb2.DecoderTotals(
            decode_steps=totals.decode_steps,
            decode_tokens=totals.decode_tokens,
            union_tokens=totals.union_tokens,
            step_time_s=totals.step_time_s,
            late_transfer_notices=totals.late_transfer_notices,
            capture_misses=totals.capture_misses,
            refused_transfers=totals.refused_transfers,
            unchecked_transfers=totals.unchecked_transfers,
        ),
    )


def decode_state(message: decode_pb2.DecoderState) -> DecoderState:
    """Message to domain."""
    hit: npt.NDArray[np.float32] | None = None
    if message.hit_frequency:
        if len(message.hit_frequency) != message.layers * message.experts:
            raise CodecError(
                f"state of {message.worker_id}: hit_frequency holds {len(message.hit_frequency)} bytes, "
                f"expected layers * experts = {message.layers} * {message.experts}"
            )
        raw = np.frombuffer(message.hit_frequency, np.uint8).reshape(message.layers, message.experts)
        hit = raw.astype(np.float32) / np.float32(255.0)
    totals = message.totals
    try:
        return DecoderState(
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            sequence=message.sequence,
            age_s=message.age_s,
            running=message.running,
            waiting=message.waiting,
            kv_usage=message.kv_usage,
            kv_tokens=message.kv_tokens,
            step_time_ewma_s=message.step_time_ewma_s,
            step_time_last_s=message.step_time_last_s,
            batch_last=message.batch_last,
            union_last=message.union_last,
            hit_frequency=hit,
            reservation_ids=frozenset(message.reservation_ids),
            draining=message.draining,
            placement_version=message.placement_version,
            totals=DecoderTotals(
                decode_steps=totals.decode_steps,
                decode_tokens=totals.decode_tokens,
                union_tokens=totals.union_tokens,
                step_time_s=totals.step_time_s,
                late_transfer_notices=totals.late_transfer_notices,
                capture_misses=totals.capture_misses,
                refused_transfers=totals.refused_transfers,
                unchecked_transfers=totals.unchecked_transfers,
            ),
        )
    except StateError as error:
        raise CodecError(f"state: {error}") from error


def encode_decision(
    decision: Decision, worker: routing_pb2.WorkerRef | None, candidates: bool = True
) -> routing_pb2.Decision:
    """Domain to message; `worker` carries the addresses of the picked worker.

    Without `candidates` they are not even made: the reasons of a large fleet take longer than the decision.
    """
    return routing_pb2.Decision(
        worker=worker,
        policy=decision.policy,
        reason=decision.reason,
        fallback=decision.fallback,
        candidates=[
            routing_pb2.Candidate(
                worker_id=candidate.worker_id,
                eligible=candidate.eligible,
                score=candidate.score,
                reason=candidate.reason,
                in_flight=candidate.in_flight,
            )
            for candidate in (decision.candidates if candidates else ())
        ],
    )


def decode_decision(message: routing_pb2.Decision) -> Decision:
    """Message to domain; the worker's addresses stay in `message.worker`."""
    return Decision(
        worker_id=message.worker.worker_id,
        policy=message.policy,
        reason=message.reason,
        fallback=message.fallback,
        candidates=tuple(
            Candidate(c.worker_id, c.eligible, c.score, c.reason, c.in_flight) for c in message.candidates
        ),
    )


def decode_query(
    reservation_id: str,
    query: routing_pb2.DecodeQuery,
    signature: ExpertSignature | None,
    signature_problem: str = "no-signature",
) -> DecodeRequest:
    """Message to domain; the caller decodes the signature, since a bad one is a fallback, not an error."""
    return DecodeRequest(
        request_id=reservation_id,
        signature=signature,
        signature_problem=signature_problem,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        domain=query.domain,
        exclude=frozenset(query.exclude_worker_ids),
    )
