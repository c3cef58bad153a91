"""Loopback ports that nothing listens on now."""

import random
import socket
from pathlib import Path

from eldr.cluster.errors import ClusterError

LOOPBACK = "127.0.0.1"
LOWEST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
DEFAULT_EPHEMERAL_START = 32_768


def free_ports(count: int, first: int = LOWEST_PORT, end: int | None = None) -> list[int]:
    """`count` different loopback ports in [first, end), each tried by binding it.

    The default `end` is where the kernel's ephemeral range begins, so that no outgoing connection takes a
    port in the minutes before its server binds it. Raises ClusterError where too few are free.
    """
    ports = list(range(first, _ephemeral_start() if end is None else end))
    random.SystemRandom().shuffle(ports)
    found: list[int] = []
    for port in ports:
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    if len(found) < count:
        raise ClusterError(f"{count} free ports wanted, {len(found)} found on {LOOPBACK}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        start = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_START
    return start if start > LOWEST_PORT + 1000 else 65_536
