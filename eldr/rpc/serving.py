"""How a gRPC server lets callers in: in clear or over TLS, with or without a check of their tokens."""

from dataclasses import dataclass

import grpc.aio

from eldr.rpc.access import interceptors
from eldr.rpc.security import Tls, warn_where_open
from eldr.rpc.settings import server_options
from eldr.rpc.tokens import TokenTable


@dataclass(frozen=True, slots=True)
class Gate:
    """`Gate()` speaks plaintext and lets everybody in."""

    tls: Tls | None = None
    tokens: TokenTable | None = None

    def server(self) -> grpc.aio.Server:
        """A server without services and addresses."""
        return grpc.aio.server(options=server_options(), interceptors=interceptors(self.tokens))

    def bind(self, server: grpc.aio.Server, listen: str) -> int:
        """Binds host:port (0: any free port) and returns the port. Raises RuntimeError where it cannot.

        A listener that others reach and that lacks TLS or tokens gets one warning.
        """
        warn_where_open(listen, self.tls, self.tokens is not None)
        if self.tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, self.tls.server_credentials())
