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
    BREAKER_OPENED = "breaker_opened"
    BREAKER_REFUSED = "breaker_refused"
    WORKER_FULL = "worker_full"
    WORKER_LOST = "worker_lost"
    CONNECTION_RETRIED = "connection_retried"
    STREAM_FAILED = "stream_failed"
    CLIENT_GONE = "client_gone"
    STREAM_CUT_AT_SHUTDOWN = "stream_cut_at_shutdown"
    COUNTS_RECORDED = "counts_recorded"
    COUNTS_DROPPED = "counts_dropped"
    COUNTS_MISSING = "counts_missing"
    COUNTS_PARTIAL = "counts_partial"
    COUNTS_REFUSED = "counts_refused"
    COUNTS_UNPLACED = "counts_unplaced"
    COUNTS_UNREMOVED = "counts_unremoved"
    COUNTS_UNWRITTEN = "counts_unwritten"
    DECODED_SENT = "decoded_sent"
    DECODED_MISSING = "decoded_missing"
    DECODED_REFUSED = "decoded_refused"
    FIRST_TOKEN_SENT = "first_token_sent"
    FIRST_TOKEN_CHAT = "first_token_chat"
    FIRST_TOKEN_COVERAGE = "first_token_coverage"
    FIRST_TOKEN_LIMITS = "first_token_limits"
    FIRST_TOKEN_LOGPROBS = "first_token_logprobs"
    FIRST_TOKEN_NO_IDS = "first_token_no_ids"
    FIRST_TOKEN_PARAMETER = "first_token_parameter"
    FIRST_TOKEN_PENALTY = "first_token_penalty"
    FIRST_TOKEN_SAMPLED = "first_token_sampled"
    FIRST_TOKEN_STOP = "first_token_stop"
    FIRST_TOKEN_TEXT = "first_token_text"


Counts = Counter[Event]
