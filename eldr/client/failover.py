"""Several routers of which any will do: the first that answers is kept until it fails."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from eldr.client.errors import NoWorkerError, is_unreachable, router_error
from eldr.rpc.calling import Caller, Line

Service = Callable[[grpc.aio.Channel], Any]


class Failover:
    """Calls the first router of `addresses` (host:port) that answers and knows a worker, and stays with it.

    `timeout_s` is the deadline of every unary call, over all addresses together: one that hangs takes its share.
    Raises RouterError, of the last address that was asked; NoWorkerError where a router knew no worker and no
    other router did.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float, caller: Caller) -> None:
        self.addresses = tuple(addresses)
        if not self.addresses or not all(self.addresses):
            raise ValueError(f"addresses must name at least one host:port, got {addresses!r}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._caller = caller
        self._lines = {address: Line(address, caller) for address in self.addresses}
        self._preferred = 0

    async def close(self) -> None:
        """Closes every channel; calls in flight are cancelled."""
        for line in self._lines.values():
            await line.close()

    def _method(self, address: str, service: Service, name: str) -> Any:
        return getattr(self._lines[address].stub(service), name)

    def _order(self) -> list[int]:
        count = len(self.addresses)
        return [(self._preferred + step) % count for step in range(count)]

    async def call(self, service: Service, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """One unary call; `timeout_s` is a shorter deadline."""
        limit_s = self._timeout_s if timeout_s is None else max(0.0, min(timeout_s, self._timeout_s))
        ends_at_s = time.monotonic() + limit_s
        order = self._order()
        empty: NoWorkerError | None = None
        for left, index in zip(range(len(order), 0, -1), order, strict=True):
            address = self.addresses[index]
            try:
                # A router that hangs takes its share of the time, not all of it.
                answer = await self._method(address, service, name)(
                    request,
                    timeout=max(0.0, ends_at_s - time.monotonic()) / left,
                    metadata=self._caller.metadata(),
                )
            except grpc.aio.AioRpcError as error:
                found = router_error(error, address)
                if is_unreachable(error):
                    await self._lines[address].renew()
                elif isinstance(found, NoWorkerError):
                    # One that has just started, or is cut off, knows fewer workers than the next may.
                    empty = empty or found
                elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise found from error
                if left == 1:
                    raise empty or found from error
            else:
                self._preferred = index
                return answer
        raise AssertionError("addresses is never empty")

    async def stream(self, service: Service, name: str, request: Any) -> AsyncGenerator[Any, None]:
        """The messages of one router; another one is tried only before the first message."""
        order = self._order()
        for index in order:
            address = self.addresses[index]
            call = self._method(address, service, name)(request, metadata=self._caller.metadata())
            begun = False
            try:
                async for message in call:
                    begun = True
                    self._preferred = index
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                if is_unreachable(error):
                    await self._lines[address].renew()
                if begun or index == order[-1] or not is_unreachable(error):
                    raise router_error(error, address) from error
            finally:
                call.cancel()
