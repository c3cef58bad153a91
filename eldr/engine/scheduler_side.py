"""Scheduler side of the connector: plans each step's capture, joins the reports, serves the worker's state."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import structlog
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from eldr.engine.config import EngineConfig
from eldr.engine.decode_counts import KEPT, WANTED_KEY, DecodeCounts
from eldr.engine.handoff import SIGNATURE_KEY, PrefillHandoff
from eldr.engine.kv_group import signature_group
from eldr.engine.pull_check import ADDRESS_KEY, INCARNATION_KEY, KvSource, PullCheck
from eldr.engine.report import StepReport
from eldr.engine.scheduler import DecodeScheduler
from eldr.engine.seen_requests import SeenRequests
from eldr.engine.services import DecodeServicer, PrefillServicer, WorkerServer
from eldr.engine.step import Span, StepPlan
from eldr.engine.transfer_questions import TransferQuestions
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.expert_signature import ExpertSignature

log = structlog.get_logger()

RESERVATION_KEY = "eldr_reservation_id"
"""Key of the router's reservation in the decode leg's `kv_transfer_params`."""


COMPLETE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True)
class _Planned:
    """What a step in flight was asked for: lengths of the prompts that it completes, positions of wanted picks."""

    prompts: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, range] = field(default_factory=dict)


class SchedulerSide:
    """One per engine. `handoff` exists on prefill workers, `decode_scheduler` on decode workers.

    `scheduler` is vLLM's, None where the patch that hands it over is missing. `can_release` says whether the
    connector can free a held transfer on request.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: WorkerInfo,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_cache_manager: Any,
        scheduler: Any,
        can_release: bool,
    ) -> None:
        self._config = config
        self._info = info
        self._kv_cache_manager = kv_cache_manager
        self._scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
        self._needs_spans = bool(vllm_config.use_v2_model_runner)
        self._drafts = vllm_config.speculative_config is not None
        # Where drafts and overlapping steps meet, positions are an upper bound while a step is in flight.
        self._positions_known = not (
            self._needs_spans and self._drafts and vllm_config.scheduler_config.async_scheduling
        )
        group = signature_group(kv_cache_config)
        self._group = group.index
        self._block_size = group.block_size
        self._requests: dict[str, Request] = {}
        self._fresh: list[int] = []
        # Running requests of which a connector said that their KV was sent: the scheduler frees them at their end.
        self._sent_early: set[str] = set()
        self._in_flight: deque[_Planned] = deque()
        self._server = WorkerServer(config, info)
        self._counts = DecodeCounts(info.geometry, config.max_tracked_requests, config.recent_signatures)
        self._seen: SeenRequests | None = None
        self.decode_scheduler: DecodeScheduler | None = None
        self.handoff: PrefillHandoff | None = None
        self._pulls = PullCheck(self._ask)
        self._questions = TransferQuestions(config.incarnation, self._pulls.answered, config.caller())
        self._service: PrefillServicer | DecodeServicer
        if info.role is WorkerRole.PREFILL:
            self.handoff = PrefillHandoff(
                info.geometry, config.recent_signatures, self._publish, can_release=can_release
            )
            self._service = PrefillServicer(info, self.handoff, lambda: float(kv_cache_manager.usage))
            self._watch_allocations(kv_cache_manager.block_pool)
        else:
            if scheduler is None:
                scheduler = self._seen = SeenRequests(kv_cache_manager)
            self.decode_scheduler = DecodeScheduler(
                scheduler, info.geometry, config.hit_window_steps, self._membership_changed
            )
            self._service = DecodeServicer(info, config, self.decode_scheduler, self._counts.kept)

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

    def _membership_changed(self) -> None:
        service = self._service
        if isinstance(service, DecodeServicer):
            self._server.call_soon(service.membership_changed)

    def _ask(self, request_id: str, source: KvSource) -> None:
        self._server.call_soon(self._questions.ask, request_id, source)

    def start(self) -> None:
        """Says which patches are missing, and starts the worker's gRPC services."""
        fix = "run `eldr patch apply` and restart"
        if self._seen is not None:
            log.warning(
                "scheduler_state_hook_missing",
                instead="the connector counts this decoder's queue and times its steps by its own calls",
                fix=fix,
            )
        if not hasattr(self._scheduler_class, "_ignore_late_kv_xfer_notice"):
            log.error(
                "late_notice_patch_missing",
                risk="a client that disconnects at the wrong moment ends this engine",
                fix=fix,
            )
        self._server.start(self._service)

    def stop(self) -> None:
        """Stops the services."""
        self._server.stop(self._questions.close)

    def _publish(self, request_id: str, signature: ExpertSignature) -> None:
        service = self._service
        if isinstance(service, PrefillServicer) and service.watched:
            self._server.call_soon(service.publish, request_id, signature)

    def arrived(self, request: Request) -> None:
        """A request entered the engine."""
        self._requests[request.request_id] = request
        if self._seen is not None:
            self._seen.arrived(request)
        params = request.kv_transfer_params or {}
        if self.decode_scheduler is not None:
            self.decode_scheduler.arrived(request.request_id, params.get(RESERVATION_KEY))
            self._pulls.arrived(request.request_id, params)
        wanted = params.get(WANTED_KEY)
        if wanted is True or wanted == KEPT:
            self._track(request, params, kept=wanted == KEPT)

    def _track(self, request: Request, params: dict[str, Any], kept: bool) -> None:
        """Counts what the request decodes; why not is logged."""
        keep_as = str(params.get(RESERVATION_KEY) or "") if kept else ""
        held = params.get("remote_num_tokens")
        computed = held if params.get("do_remote_prefill") and type(held) is int and held > 0 else None
        if kept and not keep_as:
            log.warning("decode_counts_refused", reason=f"no {RESERVATION_KEY} to keep them under")
        elif not self._positions_known:
            log.warning("decode_counts_refused", reason="asynchronous scheduling with speculative decoding")
        elif not self._counts.start(request.request_id, request, computed=computed, keep_as=keep_as):
            log.warning("decode_counts_refused", limit=self._config.max_tracked_requests)

    def _blocks(self, request_id: str, first: int, tokens: int) -> list[int]:
        """KV blocks of positions `first` to `first + tokens - 1`."""
        blocks: list[int] = self._kv_cache_manager.get_block_ids(request_id)[self._group]
        return blocks[first // self._block_size : -(-(first + tokens) // self._block_size)]

    def _span(self, request_id: str, first: int, tokens: int) -> Span:
        return Span(first, tokens, self._blocks(request_id, first, tokens))

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """What the workers shall do with the picks of the step that was just scheduled."""
        if self._seen is not None and self.decode_scheduler is not None:
            self._seen.scheduled(scheduler_output)
            self.decode_scheduler.on_schedule(scheduler_output)
        first_of = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        first_of.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = scheduler_output.scheduled_spec_decode_tokens
        prefill = self.handoff is not None
        refused = self._pulls.take_refused()
        plan = StepPlan(forget=self._fresh, refused=refused, awaited=self._pulls.waits)
        self._fresh = []
        if prefill and self._drafts:
            plan.limits = self._prompt_limits(scheduler_output)
        planned = _Planned()
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request, first = self._requests[request_id], first_of[request_id]
            prompt = request.num_prompt_tokens
            plan.tokens += tokens
            if first >= prompt - 1 and tokens == 1 + len(drafts.get(request_id, ())):
                plan.decode_tokens += tokens
            if prefill and first < prompt <= first + tokens:
                plan.finishing[request_id] = self._blocks(request_id, 0, prompt)
                planned.prompts[request_id] = prompt
            if request_id in self._counts:
                wanted = self._counts.wanted(request_id, first + tokens)
                if wanted:
                    planned.wanted[request_id] = wanted
                    plan.tracked[request_id] = self._span(request_id, wanted.start, len(wanted))
            if self._needs_spans:
                plan.spans[request_id] = self._span(request_id, first, tokens)
        if plan.tokens:
            self._in_flight.append(planned)
        return plan

    def _prompt_limits(self, scheduler_output: SchedulerOutput) -> dict[int, int]:
        """Leading slots with prompt tokens of the step's new blocks that hold, or will hold, others too."""
        size = self._block_size
        cached = scheduler_output.scheduled_cached_reqs
        new_blocks = {new.req_id: new.block_ids for new in scheduler_output.scheduled_new_reqs}
        new_blocks.update(zip(cached.req_ids, cached.new_block_ids, strict=True))
        limits: dict[int, int] = {}
        for request_id, groups in new_blocks.items():
            if groups is None:
                continue
            prompt, blocks = self._requests[request_id].num_prompt_tokens, groups[self._group]
            held = len(self._kv_cache_manager.get_blocks(request_id).blocks[self._group])
            for index, block in enumerate(blocks, held - len(blocks)):
                if prompt < (index + 1) * size:
                    limits[block] = max(0, prompt - index * size)
        return limits

    def finished(self, request: Request, held: bool, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """A request ended; returns the parameters of its answer. A second call changes nothing.

        `held` and `params` are what the inner connector says. The returned object must stay the answer's own: it
        is filled later in this step.
        """
        request_id = request.request_id
        if self._requests.pop(request_id, None) is None:
            return params
        # Blocks may also be held for a save of the connector's own, which no decoder will ever fetch.
        waits_for_decoder = held and params is not None and request_id not in self._sent_early
        self._sent_early.discard(request_id)
        counted = self._counts.finish(request_id)
        if counted is not None:
            counted.update(params or {})
            params = counted
        if self.handoff is not None:
            if params is None and _asks_for_signature(request):
                params = {}
            self.handoff.finished(request_id, waits_for_decoder, params)
            if waits_for_decoder and params is not None and "remote_request_id" in params:
                params[ADDRESS_KEY], params[INCARNATION_KEY] = self._info.grpc_address, self._info.incarnation
        if self.decode_scheduler is not None:
            self.decode_scheduler.left(request_id)
            self._pulls.left(request_id)
        if self._seen is not None:
            self._seen.left(request_id)
        return params

    def received(self, received: set[str], failed: set[str]) -> set[str]:
        """A step's transfers to here: those whose KV vLLM may use now, or knows to have failed."""
        heard = self._pulls.settle(received, failed)
        if self.decode_scheduler is not None:
            self.decode_scheduler.refused_transfers = self._pulls.refused_transfers
            self.decode_scheduler.unchecked_transfers = self._pulls.unchecked_transfers
        return heard

    def reported(self, report: StepReport | None, sent: set[str], expired: Collection[str] = ()) -> None:
        """A step's results are in: the workers' report, the transfers that are over, and which leases have ended."""
        if report is not None:
            planned = self._in_flight.popleft()
            if self.handoff is not None:
                for request_id, counts in report.counts.items():
                    self.handoff.completed(request_id, planned.prompts[request_id], counts)
            for request_id, picks in report.picks.items():
                self._counts.add(request_id, planned.wanted[request_id], picks)
            if self.decode_scheduler is not None:
                self.decode_scheduler.reported(report)
        if self.handoff is not None:
            self._sent_early.update(request_id for request_id in sent if request_id in self._requests)
            self.handoff.step_ended(sent, expired)
        self._counts.step_ended()
        if self._seen is not None and self.decode_scheduler is not None:
            # Workers report every step that had tokens.
            self.decode_scheduler.step_ended(report is not None)


def _asks_for_signature(request: Request) -> bool:
    """Whether a complete answer shall carry the signature even where the connector says nothing of its own."""
    params = request.kv_transfer_params or {}
    return params.get(SIGNATURE_KEY) is True and request.status in COMPLETE
