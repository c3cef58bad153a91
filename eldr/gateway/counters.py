"""Names of what the gateway counts."""

from collections import Counter
from enum import StrEnum


class Event(StrEnum):
    """A fallback or a failure, one name per branch."""

    REQUEST_REFUSED = "request_refused"
    NO_SIGNATURE = "no_signature"
    BAD_SIGNATURE = "bad_signature"
    NO_TRANSFER = "no_transfer"
    PREFILL_RETRIED = "prefill_retried"
    DECODE_RETRIED = "decode_retried"
    HANDOFF_STALE = "handoff_stale"
    TRANSFER_RELEASED = "transfer_released"
    RELEASE_FAILED = "release_failed"
    CONNECTION_RETRIED = "connection_retried"
    STREAM_FAILED = "stream_failed"
    CLIENT_GONE = "client_gone"
    STREAM_CUT_AT_SHUTDOWN = "stream_cut_at_shutdown"


Counts = Counter[Event]
