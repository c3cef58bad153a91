"""What the gateway reads from a client's headers."""

import hashlib
import math
import uuid
from collections.abc import Mapping

from eldr.gateway.errors import refused

FORWARDED_HEADERS = ("Authorization", "X-Session-ID", "X-Vllm-Priority", "traceparent", "tracestate")
"""Headers of the client that both legs carry. X-data-parallel-rank is none of them: it names an engine."""

DOMAIN_HEADER = "x-eldr-domain"
TIMEOUT_HEADER = "x-eldr-timeout"
MAX_HEADER_CHARS = 256


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on to a worker."""
    return {name: headers[name] for name in FORWARDED_HEADERS if name in headers}


def echoed_id(headers: Mapping[str, str]) -> str:
    """The client's own X-Request-Id where it can be echoed, else one of ours."""
    given = headers.get("X-Request-Id", "")
    return given if given and _is_plain(given) else f"eldr-{uuid.uuid4().hex}"


def domain_of(headers: Mapping[str, str]) -> str:
    """The label of the request, empty for none. Raises GatewayError 400."""
    domain = headers.get(DOMAIN_HEADER, "")
    if not _is_plain(domain):
        raise refused(
            DOMAIN_HEADER, f"{DOMAIN_HEADER} must be at most {MAX_HEADER_CHARS} printable ASCII characters"
        )
    return domain


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """The seconds that the client gives its request, None without a limit. Raises GatewayError 400."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise refused(TIMEOUT_HEADER, f"{TIMEOUT_HEADER} must be a positive number of seconds, got {text!r}")
    return seconds


def tenant_of(headers: Mapping[str, str], tenant_header: str) -> str:
    """Whose request it is: `tenant_header` where one is configured and given, else a hash of the bearer token.

    Empty for requests with neither, which share one allowance. Never the token itself.
    """
    named = headers.get(tenant_header, "") if tenant_header else ""
    if named and _is_plain(named):
        return f"name:{named}"
    token = headers.get("Authorization", "")
    return (
        f"token:{hashlib.sha256(token.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}" if token else ""
    )


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_HEADER_CHARS and text.isascii() and text.isprintable()
