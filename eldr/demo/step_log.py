"""How long decode steps took, from the reports that the router has anyway."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from eldr.client import RouterUnreachableError
from eldr.routing.state import DecoderTotals
from eldr.rpc.worker_status import WorkerStatus

PERIOD_S = 1.0
"""Of looking; reports come every half second."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """Means over the `steps` decode steps of one decoder between two of its reports.

    `batch` requests, `union` distinct experts per MoE layer (weighted by batch), `step_ms` milliseconds a step.
    """

    worker_id: str
    steps: int
    batch: float
    union: float
    step_ms: float


@dataclass(slots=True)
class StepLog:
    """Turns the totals of consecutive reports into samples; a restarted decoder begins anew."""

    samples: list[StepSample] = field(default_factory=list)
    missed: int = 0
    """Looks that the router did not answer in time; the next sample spans them."""
    _last: dict[str, tuple[str, DecoderTotals]] = field(default_factory=dict)

    def see(self, workers: Sequence[WorkerStatus]) -> None:
        """Takes the newest report of each worker."""
        for worker in workers:
            state = worker.state
            if state is None:
                continue
            incarnation, before = self._last.get(state.worker_id, ("", DecoderTotals()))
            now = state.totals
            self._last[state.worker_id] = (state.incarnation, now)
            steps = now.decode_steps - before.decode_steps
            tokens = now.decode_tokens - before.decode_tokens
            if incarnation != state.incarnation or steps <= 0 or tokens <= 0:
                continue
            self.samples.append(
                StepSample(
                    state.worker_id,
                    steps,
                    tokens / steps,
                    (now.union_tokens - before.union_tokens) / tokens,
                    1e3 * (now.step_time_s - before.step_time_s) / steps,
                )
            )

    async def follow(self, workers: Callable[[], Awaitable[Sequence[WorkerStatus]]]) -> None:
        """Looks every PERIOD_S until it is cancelled. Raises what the call raises but RouterUnreachableError."""
        while True:
            try:
                self.see(await workers())
            except RouterUnreachableError:
                self.missed += 1
            await asyncio.sleep(PERIOD_S)
