"""Asks prefill workers whether a hand-off was still held when its KV was pulled."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import grpc.aio
import structlog

from eldr.engine.pull_check import KvSource
from eldr.rpc.calling import Caller, Line
from eldr.rpc.settings import UNARY_TIMEOUT_S
from eldr.v1 import prefill_pb2
from eldr.v1.prefill_pb2_grpc import PrefillServiceStub

log = structlog.get_logger()

MAX_CHANNELS = 64
"""Prefill workers to which a channel is kept."""


class TransferQuestions:
    """Lives on one event loop. `answered` is called there with the request and whether its KV is what it should be.

    `reader` names this decoder's process, so that no other decoder's pull is taken for this one's.
    """

    def __init__(
        self, reader: str, answered: Callable[[str, bool], None], caller: Caller | None = None
    ) -> None:
        self._reader = reader
        self._caller = caller or Caller()
        self._answered = answered
        self._lines: OrderedDict[str, Line] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request_id: str, source: KvSource) -> None:
        """Starts a question. A prefill worker that does not answer confirms nothing."""
        task = asyncio.get_running_loop().create_task(self._ask(request_id, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, request_id: str, source: KvSource) -> None:
        intact = False
        try:
            line = await self._line(source.grpc_address)
            stub: Any = line.stub(PrefillServiceStub)
            request = prefill_pb2.ConfirmTransferRequest(
                transfer_id=source.transfer_id,
                incarnation=source.incarnation,
                reader_id=f"{self._reader}/{request_id}",
            )
            answer = await stub.ConfirmTransfer(
                request, timeout=UNARY_TIMEOUT_S, metadata=self._caller.metadata()
            )
            intact = answer.intact
            if not intact:
                log.warning("expired_kv_refused", request_id=request_id, transfer_id=source.transfer_id)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await line.renew()
            log.warning(
                "kv_not_confirmed",
                request_id=request_id,
                address=source.grpc_address,
                code=error.code().name,
                why=error.details(),
            )
        finally:
            self._answered(request_id, intact)

    async def _line(self, address: str) -> Line:
        line = self._lines.setdefault(address, Line(address, self._caller))
        self._lines.move_to_end(address)
        if len(self._lines) > MAX_CHANNELS:
            _, oldest = self._lines.popitem(last=False)
            await oldest.close()
        return line

    async def close(self) -> None:
        """Questions in flight end as not confirmed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in self._lines.values():
            await line.close()
        self._lines.clear()
