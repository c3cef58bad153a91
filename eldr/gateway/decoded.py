"""Decode counts of a share of the requests, from which the router's predictor learns."""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

import structlog

from eldr.client import CodecError, WorkerError
from eldr.gateway.counters import Counts, Event
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

RETRY_DELAYS_S = (0.0, 0.1)
"""Before each question. vLLM's front end finds stop strings, and the engine hears of the end a moment later."""


class ReadCounts(Protocol):
    """`WorkerClients.decode_counts`, or what stands in for it."""

    async def __call__(self, grpc_address: str, reservation_id: str) -> ExpertSignature: ...


class DecodedCounts:
    """Which requests have their decode counts kept for the router, and those counts once they have ended.

    `share` of the requests, 0 for none; `draw` gives uniform numbers of [0, 1). `limit_s` bounds how long the
    release of a booking waits for its counts.
    """

    def __init__(
        self,
        share: float,
        read_counts: ReadCounts,
        counts: Counts,
        draw: Callable[[], float] = random.random,
        limit_s: float = 1.0,
    ) -> None:
        self._share = share
        self._read_counts = read_counts
        self._counts = counts
        self._draw = draw
        self._limit_s = limit_s

    def wanted(self) -> bool:
        """Whether the next request is one of them."""
        return self._draw() < self._share

    async def read(self, grpc_address: str, reservation_id: str) -> ExpertSignature | None:
        """Counts of a request that ended well; None, counted, where the decoder does not give them in time."""
        problem = ""
        try:
            async with asyncio.timeout(self._limit_s):
                for delay_s in RETRY_DELAYS_S:
                    await asyncio.sleep(delay_s)
                    try:
                        found = await self._read_counts(grpc_address, reservation_id)
                    except WorkerError as error:
                        problem = str(error)
                        continue
                    self._counts[Event.DECODED_SENT] += 1
                    return found
        except TimeoutError:
            problem = f"no answer within {self._limit_s:g} s"
        except CodecError as error:
            self._counts[Event.DECODED_REFUSED] += 1
            log.warning("decoded_counts_refused", id=reservation_id, error=str(error))
            return None
        self._counts[Event.DECODED_MISSING] += 1
        log.info("decoded_counts_missing", id=reservation_id, error=problem)
        return None
