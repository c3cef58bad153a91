"""Scheduler side of the connector: plans each step's capture, joins the reports, serves the worker's state."""

from typing import Any

import structlog
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from eldr.engine.config import EngineConfig
from eldr.engine.decode_counts import WANTED_KEY, DecodeCounts
from eldr.engine.handoff import PrefillHandoff
from eldr.engine.kv_group import signature_group
from eldr.engine.report import StepReport
from eldr.engine.scheduler import DecodeScheduler
from eldr.engine.services import DecodeServicer, PrefillServicer, WorkerServer
from eldr.engine.step import Span, StepPlan
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

RESERVATION_KEY = "eldr_reservation_id"
"""Key of the router's reservation in the decode leg's `kv_transfer_params`."""


class SchedulerSide:
    """One per engine. `handoff` exists on prefill workers, `decode_scheduler` on patched decode workers."""

    def __init__(
        self,
        config: EngineConfig,
        info: WorkerInfo,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_cache_manager: Any,
    ) -> None:
        self._config = config
        self._info = info
        self._kv_cache_manager = kv_cache_manager
        self._needs_spans = bool(vllm_config.use_v2_model_runner)
        group = signature_group(kv_cache_config)
        self._group = group.index
        self._block_size = group.block_size
        self._requests: dict[str, Request] = {}
        self._fresh: list[int] = []
        self._prompt_tokens: dict[str, int] = {}
        self._server = WorkerServer(config, info)
        self._counts = DecodeCounts(info.geometry, config.max_tracked_requests)
        self.decode_scheduler: DecodeScheduler | None = None
        self.handoff: PrefillHandoff | None = None
        self._service: PrefillServicer | DecodeServicer
        if info.role is WorkerRole.PREFILL:
            self.handoff = PrefillHandoff(info.geometry, config.recent_signatures, self._publish)
            self._service = PrefillServicer(info, self.handoff, lambda: float(kv_cache_manager.usage))
            self._watch_allocations(kv_cache_manager.block_pool)
        else:
            self._service = DecodeServicer(info, config)

    def _watch_allocations(self, block_pool: Any) -> None:
        """Notes every block that the pool hands out: its row must keep nothing of an earlier owner (case 1.1).

        What is then computed here is counted; what is loaded from elsewhere stays uncovered, whoever loads it.
        """
        allocate = block_pool.get_new_blocks

        def noting(num_blocks: int) -> Any:
            blocks = allocate(num_blocks)
            self._fresh.extend(block.block_id for block in blocks)
            return blocks

        block_pool.get_new_blocks = noting

    def watch(self, scheduler: Any) -> None:
        """Takes the patched scheduler's state as this worker's; prefill workers report none."""
        if isinstance(self._service, DecodeServicer):
            service = self._service
            self.decode_scheduler = service.scheduler = DecodeScheduler(
                scheduler,
                self._info.geometry,
                self._config.hit_window_steps,
                lambda: self._server.call_soon(service.membership_changed),
            )

    def start(self) -> None:
        """Starts the worker's gRPC services."""
        if self._info.role is WorkerRole.DECODE and self.decode_scheduler is None:
            log.error(
                "scheduler_state_hook_missing",
                missing="queue, step time, expert union and hit frequencies of this decoder",
                fix="run `eldr patch apply` and restart",
            )
        self._server.start(self._service)

    def stop(self) -> None:
        """Stops the services."""
        self._server.stop()

    def _publish(self, request_id: str, signature: ExpertSignature) -> None:
        service = self._service
        if isinstance(service, PrefillServicer) and service.watched:
            self._server.call_soon(service.publish, request_id, signature)

    def arrived(self, request: Request) -> None:
        """A request entered the engine."""
        self._requests[request.request_id] = request
        params = request.kv_transfer_params or {}
        if self.decode_scheduler is not None:
            self.decode_scheduler.arrived(request.request_id, params.get(RESERVATION_KEY))
        if params.get(WANTED_KEY) is True and not self._counts.start(
            request.request_id, request.num_prompt_tokens
        ):
            log.warning("decode_counts_refused", limit=self._config.max_tracked_requests)

    def _blocks(self, request_id: str, first: int, tokens: int) -> list[int]:
        """KV blocks of positions `first` to `first + tokens - 1`."""
        blocks: list[int] = self._kv_cache_manager.get_block_ids(request_id)[self._group]
        return blocks[first // self._block_size : -(-(first + tokens) // self._block_size)]

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """What the workers shall do with the picks of the step that was just scheduled."""
        first_of = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        first_of.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        prefill = self.handoff is not None
        plan = StepPlan(forget=self._fresh)
        self._fresh = []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request, first = self._requests[request_id], first_of[request_id]
            prompt = request.num_prompt_tokens
            plan.tokens += tokens
            if first >= prompt - 1 and tokens == 1:
                plan.decode_tokens += 1
            if prefill and first < prompt <= first + tokens:
                plan.finishing[request_id] = self._blocks(request_id, 0, prompt)
                self._prompt_tokens[request_id] = prompt
            if request_id in self._counts:
                blocks = self._blocks(request_id, first, tokens)
                span = self._counts.wanted(request_id, first, tokens, blocks, self._block_size)
                if span is not None:
                    plan.tracked[request_id] = span
            if self._needs_spans:
                plan.spans[request_id] = Span(first, tokens, self._blocks(request_id, first, tokens))
        return plan

    def finished(self, request: Request, held: bool, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """A request ended; returns the parameters of its answer. A second call changes nothing."""
        if self._requests.pop(request.request_id, None) is None:
            return params
        if self.handoff is not None:
            self.handoff.finished(request.request_id, held, params)
        if self.decode_scheduler is not None:
            self.decode_scheduler.left(request.request_id)
        counted = self._counts.finish(request.request_id)
        if counted is not None:
            # The same object must stay in the answer: it is filled later in this step.
            counted.update(params or {})
            return counted
        return params

    def reported(self, report: StepReport | None, sent: set[str]) -> None:
        """A step's results are in: the workers' report, and the transfers that are over."""
        if report is not None:
            if self.handoff is not None:
                for request_id, counts in report.counts.items():
                    self.handoff.completed(request_id, self._prompt_tokens.pop(request_id), counts)
            for request_id, picks in report.picks.items():
                self._counts.add(request_id, picks)
            if self.decode_scheduler is not None:
                self.decode_scheduler.reported(report)
        if self.handoff is not None:
            self.handoff.step_ended(sent)
        self._counts.step_ended()
