"""Free ports are loopback ports that can be bound."""

import socket

import pytest

from eldr.cluster import ClusterError, free_ports
from eldr.cluster.ports import EPHEMERAL_RANGE


def test_ports_differ_and_can_be_bound():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_ports_lie_below_the_range_that_outgoing_connections_take():
    start = int(EPHEMERAL_RANGE.read_text().split()[0])
    assert all(10_000 <= port < start for port in free_ports(50))


def test_a_port_in_use_is_not_given():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        with pytest.raises(ClusterError, match="1 free ports wanted, 0 found"):
            free_ports(1, taken, taken + 1)
