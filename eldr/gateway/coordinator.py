"""One request: a prefill leg, a decision, a decode leg; everything it holds is given back whatever happens."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import structlog

from eldr.client import (
    CodecError,
    DecodeReservation,
    NoWorkerError,
    Outcome,
    RouterError,
    WorkerRef,
    WorkerRole,
)
from eldr.gateway.big_bodies import encoded
from eldr.gateway.bookings import DecodeBooking, PrefillBooking, Releases
from eldr.gateway.breaker import Breakers, Ticket
from eldr.gateway.counters import Event
from eldr.gateway.course import EVENT_STREAM, LEG_ID, Answer, Course
from eldr.gateway.decoded import DecodedCounts
from eldr.gateway.engine_client import EngineClient, read_all
from eldr.gateway.errors import (
    BarredError,
    GatewayError,
    LegError,
    StaleHandoffError,
    WorkerRefusalError,
    error_body,
    from_router,
)
from eldr.gateway.first_token import (
    FirstToken,
    first_events,
    later_event,
    may_begin,
    merged_answer,
    read_first_token,
    sampling_prefill_body,
    whole_answer,
)
from eldr.gateway.guard import Guard
from eldr.gateway.legs import (
    ClientRequest,
    decode_body,
    ordinary_body,
    prefill_body,
    read_prefill_reply,
    read_reply,
    usage_of,
)
from eldr.gateway.passing import PassOn
from eldr.gateway.sampling import CountSampler, FinishedRequest, NoSampling
from eldr.gateway.settings import GatewaySettings
from eldr.gateway.stream import EventRelay, once
from eldr.gateway.transfers import Handoff, Transfer
from eldr.gateway.watch import Watch

log = structlog.get_logger()


class Coordinator:
    """Serves requests. `clock` gives seconds of any monotonic clock."""

    def __init__(
        self,
        engines: EngineClient,
        releases: Releases,
        settings: GatewaySettings,
        clock: Callable[[], float],
        sampler: CountSampler | None = None,
        decoded: DecodedCounts | None = None,
    ) -> None:
        self._engines = engines
        self._releases = releases
        self._counts = releases.counts
        self._settings = settings
        self._clock = clock
        self._sampler = NoSampling() if sampler is None else sampler
        self._decoded = decoded
        self.guard = Guard(Breakers(settings.breaker_failures, settings.breaker_open_s, clock), self._counts)
        self.watch = Watch(engines.alive, settings.probe_after_s, self._counts, clock)
        self.pass_on = PassOn(engines, releases.router, settings, self.guard, self.watch)

    def now_s(self) -> float:
        """The clock by which a request's `ends_s` is meant."""
        return self._clock()

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncIterator[Answer]:
        """The answer to a request; leaving the context gives everything back. Raises GatewayError."""
        with ExitStack() as held:
            takes_first = self._settings.first_token_from_prefill and may_begin(request, self._counts)
            teaches = self._decoded is not None and self._decoded.wanted()
            course = Course(request, held, self._sampler.wanted(), teaches, takes_first=takes_first)
            try:
                answer = await self._serve_in_time(course)
            except WorkerRefusalError as refusal:
                answer = Answer(refusal.status, refusal.content_type, course.headers, refusal.body)
            except RouterError as error:
                raise from_router(error) from error
            yield answer

    async def _serve_in_time(self, course: Course) -> Answer:
        """Up to the first byte. Raises GatewayError 504 at the client's own deadline, which is no worker's fault."""
        left_s = course.left_s(self._clock())
        try:
            async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                return await self._serve(course)
        except TimeoutError as error:
            raise self._too_late() from error
        except RouterError as error:
            if course.left_s(self._clock()) > 0:
                raise
            raise self._too_late() from error

    def _too_late(self) -> GatewayError:
        self._counts[Event.DEADLINE_PASSED] += 1
        return GatewayError(504, "the request took longer than its deadline, set by x-eldr-timeout")

    async def _serve(self, course: Course) -> Answer:
        """Prefill, then decode. What another worker may do better is tried there, `attempts` times in all.

        A decoder that could not be reached leaves the hand-off as it was, and the next one takes it over. One
        that was reached may have pulled or freed the KV already, so the next one needs a new prefill leg,
        which the prefix cache makes short.
        """
        while True:
            if course.handoff is not None and self._remaining_s(course.handoff) <= 0:
                self._counts[Event.HANDOFF_STALE] += 1
                course.handoff.transfer.release()
                course.handoff = None
            try:
                if course.request.ordinary:
                    return await self._ordinary(course)
                if course.handoff is None:
                    course.handoff = await self._prefill(course)
                if course.takes_first:
                    begun = self._begin(course, course.handoff)
                    if begun is not None:
                        return begun
                return await self._decode(course, course.handoff)
            except NoWorkerError as error:
                if course.failure is None:
                    raise
                raise course.failure.as_gateway_error() from error
            except LegError as error:
                log.info(
                    "leg_failed", request=course.request.request_id, attempt=course.attempt, error=str(error)
                )
                course.failure = error
                if not isinstance(error, StaleHandoffError):
                    course.failed.add(error.worker_id)
                    if isinstance(error, BarredError):
                        continue
                if not error.retryable or course.attempt == self._settings.attempts:
                    raise error.as_gateway_error() from error
                course.attempt += 1
                self._counts[Event.DECODE_RETRIED if course.handoff else Event.PREFILL_RETRIED] += 1
                if course.handoff is not None and error.reached:
                    course.handoff.transfer.release()
                    course.handoff = None

    def _begin(self, course: Course, handoff: Handoff) -> Answer | None:
        """Makes the prefill leg's token the first of the answer where it can be.

        Returns what there is to send now: an answer that is complete, or a stream that has begun and chooses its
        decoder on the way.
        """
        course.takes_first = False
        first = read_first_token(course.request, handoff.reply)
        if not isinstance(first, FirstToken):
            self._counts[first] += 1
            return None
        self._counts[Event.FIRST_TOKEN_SENT] += 1
        streams = course.request.streams
        headers = dict(course.headers)
        if first.is_last:
            handoff.booking.outcome = Outcome.COMPLETED
            handoff.booking.release()
            handoff.transfer.release()
            self._sample(course, handoff, handoff.booking.id, decode_grpc="")
            if streams:
                return Answer(200, EVENT_STREAM, headers, once(first_events(first)))
            return Answer(200, "application/json", headers, whole_answer(first))
        course.first, course.request = first, first.continuation
        return Answer(200, EVENT_STREAM, headers, self._continued(course, first)) if streams else None

    async def _continued(self, course: Course, first: FirstToken) -> AsyncIterator[bytes]:
        """The stream from its first token on. What would have been a status is an error event by now."""
        yield first_events(first)
        try:
            answer = await self._serve_in_time(course)
        except WorkerRefusalError as refusal:
            failure = refusal.as_gateway_error()
        except RouterError as error:
            failure = from_router(error)
        except GatewayError as error:
            failure = error
        else:
            if not isinstance(answer.body, bytes):
                async for block in answer.body:
                    yield block
                return
            failure = GatewayError(502, "the decoder answered a stream's request without a stream")
        self._counts[Event.STREAM_FAILED] += 1
        yield b"data: " + failure.body() + b"\n\n"

    async def _prefill(self, course: Course) -> Handoff:
        """Books a prefill worker and has the prompt computed there; its KV is then held for a decoder."""
        request = course.request
        booking = PrefillBooking(self._releases)
        course.held.callback(booking.release)
        worker = (
            await booking.reserve(
                request.model,
                request.prefix,
                self.guard.excluded(course.failed),
                course.left_s(self._clock()),
            )
        ).worker
        course.headers["x-eldr-prefill"] = worker.worker_id
        headers = course.leg_headers(booking.id)
        body = sampling_prefill_body(request) if course.takes_first else prefill_body(request)
        transfer = Transfer(self._releases, worker, headers[LEG_ID])
        course.held.callback(transfer.release)
        with (
            booking.ends_with_the_leg(worker.worker_id),
            transfer.ends_unless_reached(),
            self.guard.leg(course.held, worker, WorkerRole.PREFILL) as ticket,
        ):
            async with self.watch.limit(worker, self._settings.prefill_timeout_s, "the prefill leg"):
                response = await self._engines.post(
                    worker,
                    request.endpoint,
                    encoded(body, request.raw),
                    headers,
                    self._settings.connect_timeout_s,
                )
                course.held.callback(response.close)
                reply = read_prefill_reply(await read_all(worker.worker_id, response))
            ticket.succeeded()
        if reply.transfer_id:
            transfer.answered(reply.transfer_id)
        else:
            self._counts[Event.NO_TRANSFER] += 1
            transfer.ended()
        return Handoff(worker, booking, transfer, reply, self._clock())

    async def _decode(self, course: Course, handoff: Handoff) -> Answer:
        """Books a decoder for the hand-off and returns its answer, a stream once its first event is there."""
        booking = DecodeBooking(self._releases)
        course.held.callback(booking.release)
        reservation = await self._reserve_decode(course, handoff, booking)
        decoder = reservation.worker
        booking.on_completed = partial(self._sample, course, handoff, booking.id, decoder.grpc_address)
        if course.teaches and self._decoded is not None and handoff.reply.signature is not None:
            booking.read_decoded = partial(self._decoded.read, decoder.grpc_address, booking.id)
        if self._remaining_s(handoff) <= 0:
            booking.outcome = Outcome.ABANDONED
            booking.release()
            raise StaleHandoffError(
                decoder.worker_id, "the hand-off grew too old before its decoder was chosen"
            )
        keeps = course.sampled or course.teaches
        body = decode_body(course.request, handoff.reply, booking.id, keeps)
        answer = await self._answer_of(course, reservation, booking, body, self._remaining_s(handoff))
        handoff.transfer.ended()
        return answer

    async def _ordinary(self, course: Course) -> Answer:
        """The whole request on one decode worker, which computes the prompt itself."""
        self._counts[Event.ORDINARY] += course.attempt == 1
        course.headers["x-eldr-ordinary"] = course.request.ordinary
        booking = DecodeBooking(self._releases)
        course.held.callback(booking.release)
        left_s = course.left_s(self._clock())
        excluded = self.guard.excluded(course.failed)
        reservation = await booking.reserve(course.request, None, 0, None, excluded, left_s)
        body = ordinary_body(course.request, booking.id)
        return await self._answer_of(course, reservation, booking, body, left_s)

    async def _answer_of(
        self,
        course: Course,
        reservation: DecodeReservation,
        booking: DecodeBooking,
        body: Mapping[str, Any],
        within_s: float,
    ) -> Answer:
        """Posts a leg to the booked decoder; it must be connected to within `within_s` seconds."""
        request, worker = course.request, reservation.worker
        course.headers["x-eldr-decode"] = worker.worker_id
        course.headers["x-eldr-policy"] = reservation.decision.policy
        limit_s = self._settings.first_token_timeout_s if request.streams else self._settings.decode_timeout_s
        with (
            booking.ends_with_the_leg(worker.worker_id),
            self.guard.leg(course.held, worker, WorkerRole.DECODE) as ticket,
        ):
            async with self.watch.limit(worker, limit_s, "the decode leg"):
                response = await self._engines.post(
                    worker,
                    request.endpoint,
                    encoded(body, request.raw),
                    course.leg_headers(booking.id),
                    max(0.001, min(self._settings.connect_timeout_s, within_s)),
                )
                course.held.callback(response.close)
                answer = await self._first_of(course, response, worker, booking, ticket)
            ticket.succeeded()
        return Answer(response.status, response.content_type, course.headers, answer)

    async def _reserve_decode(
        self, course: Course, handoff: Handoff, booking: DecodeBooking
    ) -> DecodeReservation:
        """By the prefill worker's signature alone (case 1.15); without one the router takes load only."""
        signature = handoff.reply.signature
        if signature is None:
            self._counts[Event.NO_SIGNATURE] += 1

        async def reserve(text: str | None) -> DecodeReservation:
            return await booking.reserve(
                course.request,
                handoff.booking,
                handoff.reply.prompt_tokens,
                text,
                self.guard.excluded(course.failed),
                min(self._remaining_s(handoff), course.left_s(self._clock())),
            )

        try:
            return await reserve(signature)
        except CodecError as error:
            self._counts[Event.BAD_SIGNATURE] += 1
            log.warning("bad_signature", prefill=handoff.worker.worker_id, error=str(error))
        return await reserve(None)

    async def _first_of(
        self,
        course: Course,
        response: aiohttp.ClientResponse,
        worker: WorkerRef,
        booking: DecodeBooking,
        ticket: Ticket,
    ) -> bytes | AsyncIterator[bytes]:
        """The whole JSON answer, or the stream after its first event; with a first token in front of it."""
        worker_id, first = worker.worker_id, course.first
        if response.content_type == EVENT_STREAM:
            rewrite = bytes if first is None else partial(later_event, first)
            idle_s = self._settings.idle_timeout_s

            def wait() -> AbstractAsyncContextManager[None]:
                return self.watch.limit(worker, min(idle_s, course.left_s(self._clock())), "the next token")

            relay = EventRelay(worker_id, response.content, wait, rewrite)
            await relay.open()
            booking.output_tokens = lambda: relay.output_tokens
            return self._stream(course, relay, booking, ticket)
        body = await read_all(worker_id, response)
        tokens = usage_of(read_reply(body), "completion_tokens")
        booking.output_tokens = lambda: tokens
        booking.completed()
        return body if first is None else merged_answer(first, body)

    async def _stream(
        self, course: Course, relay: EventRelay, booking: DecodeBooking, ticket: Ticket
    ) -> AsyncIterator[bytes]:
        """The decoder's events; a failure in their midst is an error event, with no [DONE] after it."""
        try:
            async for block in relay.blocks():
                yield block
        except LegError as error:
            self._counts[Event.STREAM_FAILED] += 1
            if error.outcome is Outcome.TIMEOUT and course.left_s(self._clock()) <= 0:
                failure = self._too_late()
            else:
                failure = error.as_gateway_error()
                booking.outcome = error.outcome
                self.guard.failed(error.worker_id, ticket, error.fault)
            yield b"data: " + error_body(failure.status, failure.message) + b"\n\n"
        else:
            booking.completed()

    def _sample(self, course: Course, handoff: Handoff, booking_id: str, decode_grpc: str) -> None:
        """Hands a request that ended well to the sampler. One without a signature is counted as such already."""
        signature = handoff.reply.signature
        if course.sampled and signature is not None:
            self._sampler.offer(FinishedRequest(booking_id, signature, decode_grpc, course.request.domain))

    def _remaining_s(self, handoff: Handoff) -> float:
        return self._settings.handoff_timeout_s - (self._clock() - handoff.taken_at_s)
