"""Constants that both ends of every gRPC connection share (cases 4.2, 4.3, 4.7, 4.9)."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message that either side sends or takes. A larger one is refused by name, never cut."""

KEEPALIVE_S = 20
"""Period of keepalive pings; servers permit exactly what clients do."""

UNARY_TIMEOUT_S = 5.0
"""Deadline of a unary call where the caller gives none."""

CONNECT_TIMEOUT_S = 2.0
"""Longest time that one attempt to connect may take, handshake included: enough for a busy peer, and below
UNARY_TIMEOUT_S, so that an address that swallows everything ends as unreachable."""

MAX_RECONNECT_BACKOFF_S = 1.5
"""Longest pause before a channel tries a restarted worker again."""

ERROR_METADATA_KEY = "eldr-error"
"""Trailing metadata by which the router marks an UNAVAILABLE as its own answer, not the transport's."""

NO_WORKER = "no-worker"
"""Value of ERROR_METADATA_KEY where no worker can take the request."""

Options = list[tuple[str, int]]


def channel_options() -> Options:
    """Options of every client channel."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In gRPC's core this is the timeout of an attempt; pauses between attempts are the other two.
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(MAX_RECONNECT_BACKOFF_S * 1000)),
    ]


def server_options() -> Options:
    """Options of every server."""
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),
    ]
