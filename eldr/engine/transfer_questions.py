"""Asks prefill workers whether a hand-off was still held when its KV was pulled."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

import grpc
import structlog

from eldr.engine.pull_check import KvSource
from eldr.rpc.settings import UNARY_TIMEOUT_S, channel_options
from eldr.v1 import prefill_pb2, prefill_pb2_grpc

log = structlog.get_logger()

MAX_CHANNELS = 64
"""Prefill workers to which a channel is kept."""


class TransferQuestions:
    """Lives on one event loop. `answered` is called there with the request and whether its KV is what it should be.

    `reader` names this decoder's process, so that no other decoder's pull is taken for this one's.
    """

    def __init__(self, reader: str, answered: Callable[[str, bool], None]) -> None:
        self._reader = reader
        self._answered = answered
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, request_id: str, source: KvSource) -> None:
        """Starts a question. A prefill worker that does not answer confirms nothing."""
        task = asyncio.get_running_loop().create_task(self._ask(request_id, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, request_id: str, source: KvSource) -> None:
        intact = False
        try:
            stub = prefill_pb2_grpc.PrefillServiceStub(await self._channel(source.grpc_address))
            request = prefill_pb2.ConfirmTransferRequest(
                transfer_id=source.transfer_id,
                incarnation=source.incarnation,
                reader_id=f"{self._reader}/{request_id}",
            )
            answer = await stub.ConfirmTransfer(request, timeout=UNARY_TIMEOUT_S)
            intact = answer.intact
            if not intact:
                log.warning("expired_kv_refused", request_id=request_id, transfer_id=source.transfer_id)
        except grpc.aio.AioRpcError as error:
            log.warning(
                "kv_not_confirmed",
                request_id=request_id,
                address=source.grpc_address,
                code=error.code().name,
                why=error.details(),
            )
        finally:
            self._answered(request_id, intact)

    async def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=channel_options())
            self._channels[address] = channel
        self._channels.move_to_end(address)
        if len(self._channels) > MAX_CHANNELS:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close(None)
        return channel

    async def close(self) -> None:
        """Questions in flight end as not confirmed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
