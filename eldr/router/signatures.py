"""Which signature of a query may steer a decision, and the name of what is wrong with the others."""

from dataclasses import dataclass

import structlog

from eldr.rpc.codec import CodecError, decode_signature
from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import ModelGeometry
from eldr.v1 import routing_pb2, signature_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadSignature:
    """A usable signature, or None and the name of the problem: the fallback that is counted."""

    signature: ExpertSignature | None
    problem: str


def read_signature(
    query: routing_pb2.DecodeQuery, geometry: ModelGeometry | None, min_coverage: float
) -> ReadSignature:
    """Unpacks the signature of a query; nothing that is wrong with it is an error of the call.

    Problems: `no-signature`; `bad-signature` (does not unpack, or breaks token conservation);
    `signature-mismatch` (another model than the fleet's); `empty-signature` (no token covered);
    `low-coverage` (a share of tokens below `min_coverage`).
    """
    if not query.HasField("signature"):
        return ReadSignature(None, "no-signature")
    read = _unpack(query.signature, geometry)
    if read.signature is not None and read.signature.coverage < min_coverage:
        return ReadSignature(None, "low-coverage")
    return read


def read_decoded(
    request: routing_pb2.ReleaseDecodeRequest, geometry: ModelGeometry | None
) -> ReadSignature | None:
    """The decode counts that a release brings, None where it brings none; problems as in `read_signature`."""
    return _unpack(request.decoded, geometry) if request.HasField("decoded") else None


def _unpack(message: signature_pb2.ExpertSignature, geometry: ModelGeometry | None) -> ReadSignature:
    if geometry is not None and (message.layers, message.experts) != geometry.shape:
        # Before unpacking, so that a small message of another shape cannot ask for much memory.
        log.warning("signature_mismatch", shape=(message.layers, message.experts), expected=geometry.shape)
        return ReadSignature(None, "signature-mismatch")
    try:
        signature = decode_signature(message)
    except CodecError as error:
        log.warning("bad_signature", why=str(error))
        return ReadSignature(None, "bad-signature")
    if geometry is not None:
        try:
            signature.require_geometry(geometry)
        except SignatureError as error:
            log.warning("signature_mismatch", why=str(error))
            return ReadSignature(None, "signature-mismatch")
    if signature.covered_tokens == 0:
        return ReadSignature(None, "empty-signature")
    return ReadSignature(signature, "")
