"""Probes hold once a server takes requests, and proxy variables do not lead them astray."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from eldr.cluster import free_ports, http_ready, port_ready


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_probe_holds_on_200_only(server):
    assert http_ready(f"http://{server}/health")()
    assert not http_ready(f"http://{server}/starting")()
    assert port_ready(server)()


def test_nothing_that_listens_is_not_ready():
    address = f"127.0.0.1:{free_ports(1)[0]}"
    assert not http_ready(f"http://{address}/health")()
    assert not port_ready(address)()


def test_proxy_variables_are_ignored(server, monkeypatch):
    """Case 4.7 on the HTTP side."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:1")
    assert http_ready(f"http://{server}/health")()
