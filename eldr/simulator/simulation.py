"""One run: arrivals, prefill, the router's decision, KV transfer, decoding, reports. Deterministic by its seed."""

import functools
import heapq
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eldr.calibration.profile import Profile
from eldr.router.core import RouterCore
from eldr.router.errors import NoWorkerError
from eldr.router.fleet import HealthLimits
from eldr.router.refit import LiveFit
from eldr.router.settings import RouterSettings
from eldr.routing.contract import DecodeRequest
from eldr.routing.predictor import Predictor
from eldr.routing.state import DecoderState
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.geometry import ModelGeometry
from eldr.simulator.clairvoyant import Moment
from eldr.simulator.compensation import Compensation, LessCompensated
from eldr.simulator.decoder import Running, SimDecoder
from eldr.simulator.oracle import OracleShares
from eldr.simulator.step_time import StepTime
from eldr.simulator.world import FINGERPRINT, Prompt

TICK_S = 0.25
"""Between two samples of the load, and two looks whether a refit is due."""
CORE_TICK_S = 1.0
JUDGED_SHARE = 0.1
"""Of the requests, whose predicted shares are compared with the true ones."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it reaches the gateway."""

    at_s: float
    request_id: str
    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Change:
    """At a time, decoders join, drain or die. `names` are worker ids."""

    at_s: float
    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """The fleet. `speeds` are decoders' speeds against the step-time model, by worker id.

    A prefill worker takes one prompt at a time, `prefill_tokens_per_s` tokens a second; `prefix_hit_share` of a prompt
    is in its prefix cache. Reports come every `report_period_s` and are lost with probability `report_loss`;
    `transfer_s` is between decision and decoder. The router learns the decode counts of `learn_share` of the requests
    when they end.
    """

    prefill: int = 8
    decode: int = 16
    step_time: StepTime = field(default_factory=lambda: StepTime(8.0, 0.02, 0.14))
    speeds: Mapping[str, float] = field(default_factory=dict)
    max_num_seqs: int = 512
    prefill_tokens_per_s: float = 20_000.0
    transfer_s: float = 0.005
    report_period_s: float = 0.5
    report_delay_s: float = 0.0
    report_loss: float = 0.0
    learn_share: float = 0.0
    compensation: Compensation = Compensation.FULL
    prefix_hit_share: float = 0.0
    exact: bool = False

    def names(self) -> tuple[str, ...]:
        """Worker ids of the decoders at the start."""
        return tuple(decoder_name(i) for i in range(self.decode))


def decoder_name(number: int) -> str:
    """Worker id of a decoder."""
    return f"decode-{number:03d}"


@dataclass(slots=True)
class Outcomes:
    """What became of the requests. Every arrival is in exactly one of `finished`, `refused` and `left`."""

    finished: list[tuple[Arrival, Running]] = field(default_factory=list)
    refused: int = 0
    retried: int = 0
    left: int = 0
    skew: list[tuple[float, float]] = field(default_factory=list)
    """(time, largest load over mean load) at each sample."""
    token_steps: float = 0.0
    union_tokens: float = 0.0
    placements: list[tuple[str, str]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    step_errors: list[tuple[float, float]] = field(default_factory=list)
    """(time, |predicted / true - 1|) of the step that ran at each report, predicted before the report came in."""
    share_errors: list[tuple[float, float]] = field(default_factory=list)
    """(time, share of a request's picks that its predicted shares put on other experts), of some decisions."""


def _some(request_id: str, share: float) -> bool:
    """Whether a request is among a share of all. By its id: neither the policy nor their order plays a part."""
    return zlib.crc32(request_id.encode()) < share * 2**32


class _Now(Executor):
    """Runs a job when it is submitted: a refit then takes no simulated time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  as an executor does; LiveFit reads it
            future.set_exception(error)
        return future


class Simulation:
    """`seed` seeds the policy's draws and everything that the world draws here (loss of reports).

    At each of `moments_s` the requests in flight are kept in the outcomes. With `oracle` the policy's predictor is
    replaced by the true shares of the arrivals.

    The router under test is the product's own core behind a simulated clock: it sees signatures, its bookings and
    the last reports, and nothing else.
    """

    def __init__(
        self,
        topology: Topology,
        policy: str,
        options: Mapping[str, float],
        shape: tuple[int, int],
        top_k: int,
        *,
        profile: Profile | None = None,
        changes: Sequence[Change] = (),
        refit_on_change: Callable[[int], Profile] | None = None,
        seed: int = 0,
        until_s: float = float("inf"),
        moments_s: Sequence[float] = (),
        oracle: bool = False,
    ) -> None:
        self._topology = topology
        self._changes = changes
        self._refit_on_change = refit_on_change
        self._until_s = until_s
        self._moments_s = moments_s
        self._now_s = 0.0
        self._rng = np.random.default_rng([seed, 7])
        self._geometry = ModelGeometry(tuple(range(shape[0])), shape[1], top_k, FINGERPRINT)
        # Lost reports are the scenario's: no decoder counts as dead for them.
        settings = RouterSettings(
            policy=policy,
            policy_options=options,
            reservation_ttl_s=1e6,
            health=HealthLimits(stale_s=30.0, dead_s=60.0),
            seed=seed,
        )
        core: Callable[..., RouterCore] = RouterCore
        if topology.compensation is not Compensation.FULL:
            core = functools.partial(LessCompensated, topology.compensation)
        self._oracle = OracleShares() if oracle else None
        self.core = core(
            settings, profile, clock=lambda: self._now_s, predictor=lambda: self._oracle or Predictor()
        )
        self._live = LiveFit(self.core, _Now())
        self._decoders: dict[str, SimDecoder] = {}
        self._draining: set[str] = set()
        self._arrivals: dict[str, Arrival] = {}
        self._on: dict[str, str] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._prefill_free_s = [0.0] * topology.prefill
        self.outcomes = Outcomes()

    def run(self, arrivals: Sequence[Arrival]) -> Outcomes:
        """Runs until every request has ended."""
        for name in self._topology.names():
            self._join(name)
        for change in self._changes:
            self._at(change.at_s, lambda change=change: self._change(change))  # type: ignore[misc]
        if self._oracle is not None:
            self._oracle.reveal([arrival.prompt for arrival in arrivals])
        for arrival in arrivals:
            self._at(arrival.at_s, lambda arrival=arrival: self._arrive(arrival))  # type: ignore[misc]
        for at_s in self._moments_s:
            self._at(at_s, self._keep_moment)
        self._open = len(arrivals)
        self._at(0.0, self._tick)
        while self._open and self._events:
            at_s, _, event = heapq.heappop(self._events)
            if at_s > self._until_s:
                break
            self._now_s = at_s
            event()
        self.outcomes.left = self._open
        self._sum_up()
        return self.outcomes

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    # Requests

    def _arrive(self, arrival: Arrival) -> None:
        self._arrivals[arrival.request_id] = arrival
        free = self._prefill_free_s
        worker = min(range(len(free)), key=free.__getitem__)
        computed = arrival.prompt.signature.tokens * (1.0 - self._topology.prefix_hit_share)
        took_s = computed / self._topology.prefill_tokens_per_s
        free[worker] = max(free[worker], self._now_s) + took_s
        self._at(free[worker], lambda: self._route(arrival))

    def _route(self, arrival: Arrival) -> None:
        prompt = arrival.prompt
        request = DecodeRequest(
            arrival.request_id,
            prompt.signature,
            prompt_tokens=prompt.signature.tokens,
            max_tokens=arrival.output_tokens,
            domain=prompt.domain,
        )
        try:
            booked = self.core.reserve_decode(request)
        except NoWorkerError:
            self.outcomes.refused += 1
            self._open -= 1
            return
        if _some(arrival.request_id, JUDGED_SHARE):
            predicted = self.core.models.find("").predictor.shares(prompt.signature)
            wrong = float(np.abs(predicted - prompt.shares.reshape(-1)).sum()) / 2
            picks = prompt.signature.top_k * prompt.signature.shape[0]
            self.outcomes.share_errors.append((self._now_s, wrong / picks))
        name = booked.worker.worker_id
        self._on[arrival.request_id] = name
        self.outcomes.placements.append((arrival.request_id, name))
        running = Running(arrival.request_id, prompt, arrival.output_tokens)
        self._at(self._now_s + self._topology.transfer_s, lambda: self._decode(name, arrival, running))

    def _decode(self, name: str, arrival: Arrival, running: Running) -> None:
        decoder = self._decoders[name]
        if decoder.failed:
            self._again(arrival)
            return
        idle = not decoder.running
        decoder.arrive(running, self._now_s)
        if idle:
            self._plan(decoder)
        elif len(decoder.running) < decoder.max_num_seqs:
            version = decoder.version
            self._at(decoder.boundary_s(self._now_s), lambda: self._step(decoder, version))

    def _step(self, decoder: SimDecoder, version: int) -> None:
        """A step ends at which the batch may change."""
        if decoder.version != version or decoder.failed:
            return
        for request in decoder.advance(self._now_s):
            self._finish(request)
        self._plan(decoder)

    def _plan(self, decoder: SimDecoder) -> None:
        version, at_s = decoder.version, decoder.next_change_s()
        if at_s < float("inf"):
            self._at(at_s, lambda: self._step(decoder, version))

    def _finish(self, request: Running) -> None:
        self.core.release(WorkerRole.DECODE, request.request_id, Outcome.COMPLETED, request.output_tokens)
        if _some(request.request_id, self._topology.learn_share):
            prompt, tokens = request.prompt, request.output_tokens
            self.core.models.find("").predictor.observe(
                prompt.signature, np.rint(prompt.shares * tokens).astype(np.int64), tokens
            )
        self.outcomes.finished.append((self._arrivals[request.request_id], request))
        self._open -= 1

    def _again(self, arrival: Arrival) -> None:
        """Its decoder died: the request is prefilled and placed anew."""
        self.outcomes.retried += 1
        self.core.release(WorkerRole.DECODE, arrival.request_id, Outcome.WORKER_ERROR)
        retry = Arrival(arrival.at_s, f"{arrival.request_id}+", arrival.prompt, arrival.output_tokens)
        self._arrive(retry)

    # Fleet

    def _join(self, name: str) -> None:
        topology = self._topology
        speed = topology.speeds.get(name, 1.0)
        step_time = topology.step_time
        if speed != 1.0:
            step_time = StepTime(
                step_time.base_ms, step_time.per_request_ms, step_time.per_expert_ms, speed, step_time.factors
            )
        decoder = SimDecoder(name, step_time, self._geometry.shape, topology.max_num_seqs, topology.exact)
        self._decoders[name] = decoder
        self.core.register(
            WorkerInfo(
                worker_id=name,
                incarnation=f"{name}-1",
                role=WorkerRole.DECODE,
                http_url=f"http://{name}:1",
                grpc_address=f"{name}:2",
                geometry=self._geometry,
                served_model="simulated",
                block_size=16,
                engine_version="simulated",
                max_num_seqs=topology.max_num_seqs,
            )
        )
        offset = float(self._rng.random()) * topology.report_period_s
        self.core.report(decoder.report(self._now_s))
        self._at(self._now_s + offset, lambda: self._report(decoder))

    def _report(self, decoder: SimDecoder) -> None:
        if decoder.failed or decoder.worker_id not in self._decoders:
            return
        topology = self._topology
        if self._rng.random() >= topology.report_loss:
            state = decoder.report(self._now_s, topology.report_delay_s)
            if topology.report_delay_s:
                self._at(self._now_s + topology.report_delay_s, lambda: self._receive(state))
            else:
                self._receive(state)
        self._at(self._now_s + topology.report_period_s, lambda: self._report(decoder))

    def _receive(self, state: DecoderState) -> None:
        if state.running and state.step_time_last_s > 0:
            predicted_s = (
                self.core.models.find("")
                .step_times.model("simulated")
                .predict(
                    state.batch_last,
                    state.union_last / self._geometry.experts,
                    state.kv_tokens,
                    state.worker_id,
                )
            )
            self.outcomes.step_errors.append((self._now_s, abs(predicted_s / state.step_time_last_s - 1)))
        self.core.report(state)

    def _change(self, change: Change) -> None:
        for name in change.names:
            if change.kind == "join":
                self._join(name)
            elif change.kind == "drain":
                self.core.drain(name)
                self._draining.add(name)
            else:
                self.core.remove(name)
                for lost in self._decoders[name].drop_all():
                    self._again(self._arrivals[lost.request_id])
        if self._refit_on_change is not None:
            live = [w for w in self.core.workers() if w.info.role is WorkerRole.DECODE and not w.reason]
            self.core.models.load_profile(self._refit_on_change(len(live)))

    def _tick(self) -> None:
        if self._now_s % CORE_TICK_S < TICK_S:
            self.core.tick()
        self._live.tick(self._now_s)
        self._live.tick(self._now_s)  # collects what the first one ran
        loads = [d.in_flight for d in self._decoders.values() if not d.failed]
        mean = sum(loads) / max(1, len(loads))
        self.outcomes.skew.append((self._now_s, max(loads, default=0) / mean if mean else 1.0))
        if self._open:
            self._at(self._now_s + TICK_S, self._tick)

    def _keep_moment(self) -> None:
        taking = [d for d in self._decoders.values() if not d.failed and d.worker_id not in self._draining]
        prompts = [
            (row, request.prompt)
            for row, decoder in enumerate(taking)
            for request in (*decoder.running.values(), *decoder.waiting)
        ]
        if prompts:
            self.outcomes.moments.append(
                Moment(
                    np.stack([prompt.shares for _, prompt in prompts]),
                    np.array([row for row, _ in prompts], np.intp),
                    tuple(decoder.step_time for decoder in taking),
                    self._topology.max_num_seqs,
                )
            )

    def _sum_up(self) -> None:
        for decoder in self._decoders.values():
            self.outcomes.token_steps += decoder.totals.tokens
            self.outcomes.union_tokens += decoder.totals.union_tokens
