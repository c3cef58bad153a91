"""Typed asynchronous client of the gRPC service inside one worker's engine."""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from eldr.client.errors import WorkerError, is_unreachable, worker_error
from eldr.client.results import DrainStatus, PrefillStatus, SignatureEvent
from eldr.routing.state import DecoderState
from eldr.rpc.calling import Caller, Line
from eldr.rpc.codec import decode_signature, decode_state, decode_worker_info
from eldr.rpc.settings import UNARY_TIMEOUT_S
from eldr.rpc.worker_info import WorkerInfo
from eldr.signature.expert_signature import ExpertSignature
from eldr.v1 import decode_pb2, prefill_pb2
from eldr.v1.decode_pb2_grpc import DecodeServiceStub
from eldr.v1.prefill_pb2_grpc import PrefillServiceStub

Service = Callable[[grpc.aio.Channel], Any]


class WorkerClient:
    """Calls the DecodeService or PrefillService at `address` (host:port).

    `timeout_s` is the deadline of every unary call. A failed call raises WorkerError, an answer that makes no
    sense CodecError. The channel opens at the first call, on the running loop. `caller` says whether over TLS and
    with which token.
    """

    def __init__(
        self, address: str, timeout_s: float = UNARY_TIMEOUT_S, caller: Caller | None = None
    ) -> None:
        if not address:
            raise ValueError("address must be host:port, got an empty text")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.address = address
        self._timeout_s = timeout_s
        self._caller = caller or Caller()
        self._line = Line(address, self._caller)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls in flight are cancelled."""
        await self._line.close()

    async def get_info(self) -> WorkerInfo:
        """What the worker says of itself, whichever of the two services it runs."""
        request = decode_pb2.DecodeServiceGetInfoRequest()
        try:
            answer = await self._call(DecodeServiceStub, "GetInfo", request)
        except WorkerError as error:
            if error.code != grpc.StatusCode.UNIMPLEMENTED:
                raise
            return (await self.get_prefill_status()).info
        return decode_worker_info(answer.info)

    # PrefillService.

    async def get_prefill_status(self) -> PrefillStatus:
        """Info and load of a prefill worker."""
        request = prefill_pb2.PrefillServiceGetInfoRequest()
        answer = await self._call(PrefillServiceStub, "GetInfo", request)
        return PrefillStatus(decode_worker_info(answer.info), answer.held_transfers, answer.kv_usage)

    async def release_transfer(self, transfer_id: str, incarnation: str = "") -> bool:
        """Frees the KV blocks of a hand-off that no decoder will pull.

        `transfer_id` is `remote_request_id` of the kv_transfer_params. With an `incarnation` other than the
        worker's own nothing is released. True when the transfer was held and is now free.
        """
        request = prefill_pb2.ReleaseTransferRequest(transfer_id=transfer_id, incarnation=incarnation)
        answer = await self._call(PrefillServiceStub, "ReleaseTransfer", request)
        return bool(answer.released)

    async def get_signature(self, transfer_id: str) -> ExpertSignature:
        """Signature of a finished prompt. WorkerError NOT_FOUND when it is gone or never was complete."""
        request = prefill_pb2.GetSignatureRequest(transfer_id=transfer_id)
        answer = await self._call(PrefillServiceStub, "GetSignature", request)
        return decode_signature(answer.signature)

    async def watch_signatures(self) -> AsyncGenerator[SignatureEvent, None]:
        """Signatures of prompts as they complete. A slow reader loses the oldest."""
        request = prefill_pb2.WatchSignaturesRequest()
        async for event in self._stream(PrefillServiceStub, "WatchSignatures", request):
            yield SignatureEvent(event.transfer_id, decode_signature(event.signature), event.dropped)

    # DecodeService.

    async def get_state(self) -> DecoderState:
        """Live state of a decode worker."""
        answer = await self._call(DecodeServiceStub, "GetState", decode_pb2.GetStateRequest())
        return decode_state(answer.state)

    async def watch_state(self, period_s: float = 0.0) -> AsyncGenerator[DecoderState, None]:
        """A report at once, then at each change and at least every `period_s` (0: the worker's setting)."""
        request = decode_pb2.WatchStateRequest(period_s=period_s)
        async for answer in self._stream(DecodeServiceStub, "WatchState", request):
            yield decode_state(answer.state)

    async def get_decode_counts(self, reservation_id: str) -> ExpertSignature:
        """Counts of what a finished request decoded, of no token where it ended with its first.

        Its decode leg must have asked for that. WorkerError NOT_FOUND when they are gone or never were.
        """
        request = decode_pb2.GetDecodeCountsRequest(reservation_id=reservation_id)
        answer = await self._call(DecodeServiceStub, "GetDecodeCounts", request)
        return decode_signature(answer.signature)

    async def drain(self, draining: bool = True) -> DrainStatus:
        """Marks a decode worker as draining in its reports, or takes that back."""
        request = decode_pb2.DrainRequest(draining=draining)
        answer = await self._call(DecodeServiceStub, "Drain", request)
        return DrainStatus(answer.running, answer.waiting)

    # Transport.

    def _method(self, service: Service, name: str) -> Any:
        return getattr(self._line.stub(service), name)

    async def _failed(self, error: grpc.aio.AioRpcError) -> WorkerError:
        if is_unreachable(error):
            await self._line.renew()
        return worker_error(error, self.address)

    async def _call(self, service: Service, name: str, request: Any) -> Any:
        try:
            return await self._method(service, name)(
                request, timeout=self._timeout_s, metadata=self._caller.metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error) from error

    async def _stream(self, service: Service, name: str, request: Any) -> AsyncGenerator[Any, None]:
        call = self._method(service, name)(request, metadata=self._caller.metadata())
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise await self._failed(error) from error
        finally:
            call.cancel()
