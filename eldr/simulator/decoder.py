"""A simulated decoder: continuous batching with a step time that follows the batch and its expert union."""

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eldr.routing.state import DecoderState, DecoderTotals
from eldr.simulator.step_time import StepTime
from eldr.simulator.world import Prompt

WINDOW_STEPS = 16
AHEAD_STEPS = 16
"""Of an unchanged batch, whose exact unions are made at once."""
_LEAST_LEFT = 1e-6

Masks = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Running:
    """A request in a decoder. Times are NaN until they are known.

    `joined_step` are the steps that its decoder had taken when it joined, `order` its place among all that joined.
    `log_kept` [layers, experts] is log(1 - share), with expected unions; `masks` uint64 [steps, layers, words] are its
    routes as bit sets, where single steps are simulated.
    """

    request_id: str
    prompt: Prompt
    output_tokens: int
    joined_step: int = 0
    order: int = 0
    joined_s: float = float("nan")
    first_s: float = float("nan")
    last_s: float = float("nan")
    log_kept: npt.NDArray[np.float32] | None = None
    masks: Masks | None = None


@dataclass(slots=True)
class Totals:
    """Running sums, as a decoder reports them."""

    steps: int = 0
    tokens: int = 0
    union_tokens: float = 0.0
    step_time_s: float = 0.0


@dataclass(eq=False)
class SimDecoder:
    """Steps between two changes of the batch are alike, so that they are taken together.

    A request joins at the end of the step that runs when it arrives, and waits where `max_num_seqs` run. With
    expected unions a step's union is the sum over experts of 1 - prod(1 - share), mean over layers; with routes it is
    that of the picks of every step.
    """

    worker_id: str
    step_time: StepTime
    shape: tuple[int, int]
    max_num_seqs: int
    exact: bool = False
    running: dict[str, Running] = field(default_factory=dict)
    waiting: deque[Running] = field(default_factory=deque)
    totals: Totals = field(default_factory=Totals)
    failed: bool = False
    version: int = 0
    """Grows with each change of plan, so that events planned before are void."""

    def __post_init__(self) -> None:
        self._log_left = np.zeros(self.shape, np.float64)
        self._hit = np.zeros(self.shape, np.float32)
        self._mean = np.zeros(self.shape, np.float32)
        self._ends: list[tuple[int, int, Running]] = []
        self._new: list[Running] = []
        self._joined = 0
        self._prompt_tokens = 0
        self._joined_steps = 0
        self._begun_s = 0.0
        self._step_s = 0.0
        self._union = 0.0
        self._ahead = np.zeros((0, *self.shape), np.bool_)
        self._ahead_from = 0
        self._sequence = 0
        self._last_batch = 0
        self._last_union = 0.0
        self._last_step_s = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.waiting)

    def arrive(self, request: Running, now_s: float) -> None:
        """A request and its KV are there."""
        self.waiting.append(request)
        if not self.running:
            self._advance(now_s, 0)
            self._admit(now_s)

    def next_change_s(self) -> float:
        """When the batch changes next: a request ends, or one that waits may join. Infinite where nothing runs."""
        if not self.running:
            return float("inf")
        steps = 1 if self.exact else self._steps_left()
        return self._begun_s + steps * self._step_s

    def boundary_s(self, now_s: float) -> float:
        """End of the step that runs at `now_s`, when a request that arrived may join."""
        elapsed = max(0.0, now_s - self._begun_s)
        steps = max(1, int(np.ceil(elapsed / self._step_s - 1e-9)))
        return self._begun_s + steps * self._step_s

    def advance(self, now_s: float) -> list[Running]:
        """Takes all steps up to `now_s`, which ends one; returns the requests that ended with it."""
        if not self.running:
            return []
        steps = round((now_s - self._begun_s) / self._step_s)
        self._advance(now_s, steps)
        ended = []
        while self._ends and self._steps_left() <= 0:
            request = heapq.heappop(self._ends)[2]
            request.last_s = now_s
            del self.running[request.request_id]
            self._leave(request)
            ended.append(request)
        self._admit(now_s)
        return ended

    def drop_all(self) -> list[Running]:
        """The decoder died: what it had."""
        lost = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self._ends.clear()
        self._new.clear()
        self._log_left[:] = 0.0
        self.failed = True
        self.version += 1
        return lost

    def report(self, now_s: float, age_s: float = 0.0) -> DecoderState:
        """What its scheduler advertises at this time: whole steps only."""
        self._fold(now_s)
        self._sequence += 1
        totals = self.totals
        ran = totals.steps > 0
        return DecoderState(
            self.worker_id,
            f"{self.worker_id}-1",
            self._sequence,
            age_s=age_s,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens=self._prompt_tokens + len(self.running) * totals.steps - self._joined_steps,
            step_time_ewma_s=self._last_step_s,
            step_time_last_s=self._last_step_s,
            batch_last=self._last_batch,
            union_last=self._last_union,
            hit_frequency=np.clip(self._hit, 0.0, 1.0) if ran else None,
            reservation_ids=frozenset([*self.running, *(request.request_id for request in self.waiting)]),
            totals=DecoderTotals(totals.steps, totals.tokens, totals.union_tokens, totals.step_time_s),
        )

    def _fold(self, now_s: float) -> None:
        """Takes the whole steps before `now_s` without changing the batch."""
        if self.running and self._step_s > 0:
            steps = int((now_s - self._begun_s) / self._step_s + 1e-9)
            if steps > 0:
                most = self._steps_left() - 1
                self._advance(self._begun_s + min(steps, most) * self._step_s, min(steps, most))

    def _advance(self, now_s: float, steps: int) -> None:
        if steps > 0 and self.running:
            batch = len(self.running)
            for request in self._new:
                request.first_s = self._begun_s + self._step_s
            self._new.clear()
            totals = self.totals
            totals.steps += steps
            totals.tokens += steps * batch
            totals.union_tokens += steps * batch * self._union
            totals.step_time_s += steps * self._step_s
            keep = (1.0 - 1.0 / WINDOW_STEPS) ** steps
            self._hit *= keep
            self._hit += (1.0 - keep) * self._mean
            self._last_batch, self._last_union, self._last_step_s = batch, self._union, self._step_s
        self._begun_s = now_s

    def _admit(self, now_s: float) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            request.joined_s = now_s
            request.joined_step, request.order = self.totals.steps, self._joined
            self._joined += 1
            self._forget_ahead()
            self._joined_steps += request.joined_step
            self._prompt_tokens += request.prompt.signature.tokens
            self.running[request.request_id] = request
            self._new.append(request)
            heapq.heappush(self._ends, (request.joined_step + request.output_tokens, request.order, request))
            if self.exact:
                if request.prompt.routes is None:
                    raise ValueError(f"{request.request_id} has no routes, which exact unions need")
                request.masks = bit_sets(request.prompt.routes, self.shape[1])
            else:
                request.log_kept = np.log1p(-np.minimum(request.prompt.shares, 1 - _LEAST_LEFT))
                self._log_left += request.log_kept
        self._begun_s = now_s
        self.version += 1
        self._plan()

    def _leave(self, request: Running) -> None:
        self._forget_ahead()
        self._joined_steps -= request.joined_step
        self._prompt_tokens -= request.prompt.signature.tokens
        if request.log_kept is not None:
            self._log_left -= request.log_kept
            request.log_kept = None
        if not self.running:
            self._log_left[:] = 0.0

    def _steps_left(self) -> int:
        """Steps until the next request ends; below 1 where one just has."""
        return self._ends[0][0] - self.totals.steps

    def _plan(self) -> None:
        """Union and time of the next step."""
        if not self.running:
            self._step_s = self._union = 0.0
            return
        touched = self._touched() if self.exact else -np.expm1(np.minimum(self._log_left, 0.0))
        self._mean = touched.astype(np.float32)
        self._union = float(touched.sum()) / self.shape[0]
        self._step_s = self.step_time.seconds(len(self.running), self._union)

    def _touched(self) -> npt.NDArray[np.bool_]:
        place = self.totals.steps - self._ahead_from
        if not 0 <= place < len(self._ahead):
            self._ahead_from, place = self.totals.steps, 0
            self._ahead = self._next_unions()
        touched: npt.NDArray[np.bool_] = self._ahead[place]
        return touched

    def _next_unions(self) -> npt.NDArray[np.bool_]:
        """Of the next steps if the batch stays, bool [steps, layers, experts]."""
        ahead = np.arange(self.totals.steps, self.totals.steps + AHEAD_STEPS)
        union: Masks | None = None
        for request in self.running.values():
            if request.masks is not None:
                picked = request.masks.take(ahead - request.joined_step, axis=0, mode="wrap")
                union = picked if union is None else np.bitwise_or(union, picked, out=union)
        assert union is not None
        bits = np.unpackbits(union.view(np.uint8), axis=-1, count=self.shape[1], bitorder="little")
        return bits.view(np.bool_)

    def _forget_ahead(self) -> None:
        self._ahead = self._ahead[:0]


def bit_sets(routes: npt.NDArray[np.uint8], experts: int) -> Masks:
    """The experts of `routes` [steps, layers, top_k] as bits, uint64 [steps, layers, ceil(experts / 64)]."""
    steps, layers, _ = routes.shape
    chosen = np.zeros((steps, layers, -(-experts // 64) * 64), np.bool_)
    np.put_along_axis(chosen, routes.astype(np.intp), True, axis=-1)
    return np.packbits(chosen, axis=-1, bitorder="little").view("<u8").astype(np.uint64, copy=False)
