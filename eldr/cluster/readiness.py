"""Probes that say whether a local server takes requests. They ignore proxy variables."""

import http.client
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 2.0


def http_ready(url: str) -> Callable[[], bool]:
    """Holds once a GET of `url` answers 200."""
    parts = urlsplit(url)

    def probe() -> bool:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", parts.path or "/")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return probe


def port_ready(address: str) -> Callable[[], bool]:
    """Holds once something listens at `host:port`."""
    host, _, port = address.rpartition(":")

    def probe() -> bool:
        try:
            socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    return probe
