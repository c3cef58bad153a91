"""How a process calls another one over gRPC: in clear or over TLS, with or without a bearer token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from eldr.rpc.security import Loaded, Tls
from eldr.rpc.settings import channel_options

AUTHORIZATION = "authorization"

Metadata = tuple[tuple[str, str], ...]


class TokenSource(Protocol):
    """The token that a caller shows."""

    def shown(self) -> str:
        """The token as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `Caller()` speaks plaintext and shows nothing."""

    tls: Tls | None = None
    token: TokenSource | None = None

    def metadata(self) -> Metadata:
        """Of every call."""
        return () if self.token is None else ((AUTHORIZATION, f"Bearer {self.token.shown()}"),)


class Line:
    """A channel to one address, made at the first use. Not shared between event loops.

    gRPC keeps the certificates with which a channel was made. `renew` after a failed call drops a channel whose
    files have changed since, so that the next use reconnects with the new ones; an established connection goes on.
    """

    def __init__(self, address: str, caller: Caller) -> None:
        self.address = address
        self._caller = caller
        self._channel: grpc.aio.Channel | None = None
        self._files: Loaded | None = None
        self._stubs: dict[Callable[[grpc.aio.Channel], object], object] = {}

    def stub(self, service: Callable[[grpc.aio.Channel], object]) -> object:
        """The stub of a service on the channel."""
        if service not in self._stubs:
            self._stubs[service] = service(self._open())
        return self._stubs[service]

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            tls = self._caller.tls
            if tls is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=channel_options())
            else:
                self._files = tls.current()
                self._channel = grpc.aio.secure_channel(
                    self.address, tls.channel_credentials(), options=channel_options()
                )
        return self._channel

    async def renew(self) -> bool:
        """After a call that found nobody: True where the next one goes out with newer certificates."""
        tls = self._caller.tls
        if self._channel is None or tls is None or tls.current() is self._files:
            return False
        await self.close()
        return True

    async def close(self) -> None:
        """Calls in flight are cancelled; the next use opens a channel again."""
        channel, self._channel = self._channel, None
        self._stubs.clear()
        if channel is not None:
            await channel.close(None)


def tls_hint(detail: str) -> str:
    """What to do about a failed connection whose cause lies in TLS (case 4.11), empty where it does not."""
    if "WRONG_VERSION_NUMBER" in detail:
        return "the other side speaks plaintext and this side TLS; start it with TLS, or leave out this side's tls"
    if "certificate has expired" in detail:
        return "the other side's certificate has expired"
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return "the other side's certificate is not signed by this side's tls ca"
    if "Hostname Verification Check failed" in detail or "Peer name" in detail:
        return (
            "the other side's certificate is not for this address; it needs it as a subject alternative name"
        )
    if "Socket closed" in detail or "Connection reset" in detail:
        return "where the other side speaks TLS, this side needs tls ca, and with mutual TLS also tls cert and key"
    return ""
