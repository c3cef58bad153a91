"""The decode scheduler's own state, advertised to routers.

Installed by the patch `0001-scheduler-state-hook` into V1's `Scheduler` and, through inheritance, into
`AsyncScheduler`; without the patch the connector itself calls it. The engine thread calls `on_schedule` and
`on_update`; any thread may call `snapshot`.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eldr.engine.hit_frequency import HitFrequency
from eldr.routing.state import DecoderState, DecoderTotals
from eldr.signature.geometry import ModelGeometry

if TYPE_CHECKING:
    from eldr.engine.report import StepReport

STEP_TIME_WEIGHT = 0.1
"""Weight of the newest step in the exponentially weighted step time."""


@dataclass(slots=True)
class _Scalars:
    """What the engine thread publishes; a published one never changes. The totals are those of DecoderTotals."""

    taken: float = field(default_factory=time.monotonic)
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0
    reservation_ids: frozenset[str] = frozenset()
    step_time_ewma_s: float = 0.0
    step_time_last_s: float = 0.0
    batch_last: int = 0
    union_last: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    union_tokens: float = 0.0
    step_time_s: float = 0.0
    late_transfer_notices: int = 0
    capture_misses: int = 0
    refused_transfers: int = 0
    unchecked_transfers: int = 0

    def copied(self) -> "_Scalars":
        """A copy, at a tenth of what dataclasses.replace takes: this runs in every step."""
        copy = object.__new__(_Scalars)
        for name in _Scalars.__slots__:
            setattr(copy, name, getattr(self, name))
        return copy


class DecodeScheduler:
    """Watches one vLLM scheduler: queue, KV use, step time, expert union and hit frequencies.

    Steps that mix prefill with decode tokens count for nothing.
    """

    def __init__(
        self,
        scheduler: Any,
        geometry: ModelGeometry,
        window_steps: int,
        on_membership: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._hit = HitFrequency(window_steps)
        self._on_membership = on_membership
        self._clock = clock
        self._scheduled: deque[float] = deque()
        self._last_update = float("-inf")
        self._report: StepReport | None = None
        self._reservations: dict[str, str] = {}
        self._reservation_ids: frozenset[str] = frozenset()
        self._membership = (0, 0, self._reservation_ids)
        self._now = _Scalars()
        self.draining = False
        self.refused_transfers = 0
        self.unchecked_transfers = 0

    def arrived(self, request_id: str, reservation_id: str | None) -> None:
        """A request entered the engine."""
        if reservation_id:
            self._reservations[request_id] = reservation_id
            self._reservation_ids = frozenset(self._reservations.values())

    def left(self, request_id: str) -> None:
        """A request ended, however."""
        if self._reservations.pop(request_id, None) is not None:
            self._reservation_ids = frozenset(self._reservations.values())

    def reported(self, report: "StepReport") -> None:
        """The workers' report of the step that `on_update` will close."""
        self._report = report

    def on_schedule(self, scheduler_output: Any) -> None:
        """Called by the patched scheduler when a step was planned."""
        if scheduler_output.total_num_scheduled_tokens:
            self._scheduled.append(self._clock())

    def on_update(self, scheduler_output: Any) -> None:
        """Called by the patched scheduler when a step's results are in."""
        self.step_ended(bool(scheduler_output.total_num_scheduled_tokens))

    def step_ended(self, had_tokens: bool) -> None:
        """A step's results are in; one without tokens ran nothing."""
        now = self._clock()
        scalars = self._now.copied()
        if had_tokens and self._scheduled:
            # With overlapping steps the time between two completions is what a token waits for.
            seconds = now - max(self._scheduled.popleft(), self._last_update)
            self._last_update = now
            self._close_step(scalars, seconds)
        self._report = None
        scheduler = self._scheduler
        scalars.running, scalars.waiting = scheduler.get_request_counts()
        scalars.kv_usage = float(scheduler.kv_cache_manager.usage)
        scalars.kv_tokens = sum(request.num_computed_tokens for request in scheduler.running)
        scalars.reservation_ids = self._reservation_ids
        scalars.late_transfer_notices = getattr(scheduler, "num_late_kv_xfer_notices", 0)
        scalars.refused_transfers = self.refused_transfers
        scalars.unchecked_transfers = self.unchecked_transfers
        scalars.taken = now
        self._now = scalars
        membership = (scalars.running, scalars.waiting, scalars.reservation_ids)
        if membership != self._membership:
            self._membership = membership
            self._on_membership()

    def _close_step(self, scalars: _Scalars, seconds: float) -> None:
        report = self._report
        if report is None:
            return
        scalars.capture_misses += report.misses
        if report.union is not None and report.decode_tokens:
            union = report.union.tobytes().count(1) / len(report.union)
            self._hit.add(report.union)
            first = scalars.decode_steps == 0
            scalars.step_time_last_s = seconds
            scalars.step_time_ewma_s += (1.0 if first else STEP_TIME_WEIGHT) * (
                seconds - scalars.step_time_ewma_s
            )
            scalars.batch_last = report.decode_tokens
            scalars.union_last = union
            scalars.decode_steps += 1
            scalars.decode_tokens += report.decode_tokens
            scalars.union_tokens += report.decode_tokens * union
            scalars.step_time_s += seconds

    def snapshot(self, worker_id: str, incarnation: str, sequence: int) -> DecoderState:
        """A report of the newest state. Any thread."""
        now = self._now
        return DecoderState(
            worker_id=worker_id,
            incarnation=incarnation,
            sequence=sequence,
            age_s=max(0.0, self._clock() - now.taken),
            running=now.running,
            waiting=now.waiting,
            kv_usage=now.kv_usage,
            kv_tokens=now.kv_tokens,
            step_time_ewma_s=now.step_time_ewma_s,
            step_time_last_s=now.step_time_last_s,
            batch_last=now.batch_last,
            union_last=now.union_last,
            hit_frequency=self._hit.read(),
            reservation_ids=now.reservation_ids,
            draining=self.draining,
            totals=DecoderTotals(
                decode_steps=now.decode_steps,
                decode_tokens=now.decode_tokens,
                union_tokens=now.union_tokens,
                step_time_s=now.step_time_s,
                late_transfer_notices=now.late_transfer_notices,
                capture_misses=now.capture_misses,
                refused_transfers=now.refused_transfers,
                unchecked_transfers=now.unchecked_transfers,
            ),
        )
