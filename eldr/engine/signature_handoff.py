"""What eldr adds to a KV connector: capture in the workers, plan and hand-off in the scheduler."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import structlog
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from eldr.engine.capture import check_supported
from eldr.engine.config import EngineConfig, EngineConfigError
from eldr.engine.cpu_cores import affinity_kept
from eldr.engine.fingerprint import model_fingerprint
from eldr.engine.handoff import remote_tokens
from eldr.engine.multi import check_name, check_place
from eldr.engine.nixl import expire_lease, nixl_schedulers, note_expired, spare_cores
from eldr.engine.report import WorkerMetadata
from eldr.engine.scheduler import DecodeScheduler
from eldr.engine.scheduler_side import SchedulerSide
from eldr.engine.step import StepPlan
from eldr.engine.worker import CaptureWorker
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature.geometry import ModelGeometry

log = structlog.get_logger()

CPU_PROGRESS_DELAY_US = 1000
_ROLES = {"kv_producer": WorkerRole.PREFILL, "kv_consumer": WorkerRole.DECODE}


@dataclass
class EldrHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler at start: the inner connector's handshake, and the MoE layers that this rank owns."""

    inner: KVConnectorHandshakeMetadata | None
    moe_layers: tuple[int, ...]


def worker_role(vllm_config: VllmConfig) -> WorkerRole:
    """Leg that this engine serves. Raises EngineConfigError where it is not one of them."""
    kv_role = vllm_config.kv_transfer_config.kv_role
    if kv_role not in _ROLES:
        raise EngineConfigError(
            f'kv_role must be "kv_producer" (prefill) or "kv_consumer" (decode) with eldr, got {kv_role!r}'
        )
    return _ROLES[kv_role]


class SignatureHandoff(KVConnectorBase_V1):  # type: ignore[misc]
    """Mixin that gives a KV connector expert capture, the block-indexed signature cache and the hand-off.

    Stands before the inner connector in the order of bases; every method does eldr's part and passes on.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._config = EngineConfig.from_extra_config(transfer.kv_connector_extra_config)
        self._role_of_worker = worker_role(vllm_config)
        check_supported(vllm_config)
        check_name(type(self), vllm_config)
        delay_us = self._config.nixl_progress_delay_us
        if delay_us is None and current_platform.is_cpu():
            delay_us = CPU_PROGRESS_DELAY_US
        if delay_us is not None and delay_us >= 0:
            spare_cores(type(self), transfer, delay_us)
        with affinity_kept() if current_platform.is_cpu() else nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)
        self._worker: CaptureWorker | None = None
        self._plan: StepPlan | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._vllm_scheduler: Any = None
        self._expired: set[str] = set()
        if role is KVConnectorRole.WORKER:
            note_expired(self, self._expired.update)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Binds the capture before graphs are recorded."""
        check_place(self, get_kv_transfer_group())
        super().register_kv_caches(kv_caches)
        self._worker = CaptureWorker(self._vllm_config, self._kv_cache_config, self._role_of_worker)
        cache = self._worker.cache
        log.info(
            "expert_capture_bound",
            layers=len(self._worker.capturer.layers),
            cache_bytes=0 if cache is None else cache.nbytes,
        )

    def get_handshake_metadata(self) -> EldrHandshake:
        """Adds this rank's MoE layers to what the inner connector sends to the scheduler at start."""
        assert self._worker is not None
        return EldrHandshake(super().get_handshake_metadata(), self._worker.capturer.layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Inside the step, after its forward pass: the last moment at which its slots are known."""
        if self._worker is not None:
            self._worker.note_forward(forward_context, kwargs)
        super().start_load_kv(forward_context, **kwargs)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes the step's plan off the inner connector's metadata."""
        self._plan = getattr(connector_metadata, "eldr_plan", None)
        if self._worker is not None:
            self._worker.begin_step()
        super().bind_connector_metadata(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Adds to the failed loads those whose KV was pulled too late: vLLM recomputes or fails them."""
        results = super().get_transfer_results(finished_req_ids)
        if self._plan is not None:
            results.finished_recving.update(self._plan.refused)
            results.failed_recving.update(self._plan.refused)
        return results

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The step's report to the scheduler, beside the inner connector's."""
        inner = super().build_connector_worker_meta()
        plan, self._plan = self._plan, None
        report = None if self._worker is None or plan is None else self._worker.finish_step(plan)
        expired = frozenset(self._expired)
        self._expired.clear()
        # Without an output of any kind the scheduler's side would not see the end of the step.
        awaited = plan is not None and plan.awaited
        if report is None and inner is None and not expired and not awaited:
            return None
        return WorkerMetadata(report, inner, expired)

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Keeps the manager here too: MultiConnector only passes it on."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are up: their layers give the geometry, and the worker's services start."""
        layers: set[int] = set()
        inner: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
        for rank, handshake in metadata.items():
            assert isinstance(handshake, EldrHandshake), "check_place"
            layers.update(handshake.moe_layers)
            if handshake.inner is not None:
                inner[rank] = handshake.inner
        if inner:
            super().set_xfer_handshake_metadata_pp_aware(inner)
        self._scheduler_side = SchedulerSide(
            self._config,
            self._worker_info(tuple(sorted(layers))),
            self._vllm_config,
            self._kv_cache_config,
            self._kv_cache_manager,
            self._vllm_scheduler,
            can_release=bool(nixl_schedulers(self)),
        )
        self._scheduler_side.start()

    def create_scheduler_tap(self, scheduler: Any) -> "SchedulerTap":
        """Called by the patched scheduler when it is built, before the workers are known."""
        self._vllm_scheduler = scheduler
        return SchedulerTap(self)

    @property
    def decode_scheduler(self) -> DecodeScheduler | None:
        """The decoder's state, once the workers are up."""
        return None if self._scheduler_side is None else self._scheduler_side.decode_scheduler

    def on_new_request(self, request: Request) -> None:
        """A request entered the engine."""
        super().on_new_request(request)
        if self._scheduler_side is not None:
            self._scheduler_side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that come from outside: never more than prefill computed. None asks the scheduler to wait."""
        found, in_background = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not found:
            return found, in_background
        count = remote_tokens(found, num_computed_tokens, request.kv_transfer_params or {})
        return count, in_background and count > 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Adds the step's plan to the inner connector's metadata."""
        side = self._scheduler_side
        if side is not None and side.handoff is not None:
            for request_id in side.handoff.take_releases():
                expire_lease(self, request_id)
        metadata = super().build_connector_meta(scheduler_output)
        if side is not None:
            metadata.eldr_plan = side.plan(scheduler_output)
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Reserves the signature's place in the answer's parameters."""
        return self._finished(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for connectors that know several KV-cache groups."""
        return self._finished(request, *super().request_finished_all_groups(request, block_ids))

    def _finished(
        self, request: Request, held: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler_side is not None:
            params = self._scheduler_side.finished(request, held, params)
        return held, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Reads the workers' report of the step; the inner connector sees only its own."""
        both = connector_output.kv_connector_worker_meta
        report, expired = None, frozenset[str]()
        if isinstance(both, WorkerMetadata):
            report, expired = both.report, both.expired
            connector_output.kv_connector_worker_meta = both.inner
        if self._scheduler_side is not None:
            connector_output.finished_recving = self._scheduler_side.received(
                connector_output.finished_recving or set(), connector_output.failed_recving
            )
        try:
            super().update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = both
        if self._scheduler_side is not None:
            self._scheduler_side.reported(report, connector_output.finished_sending or set(), expired)

    def shutdown(self) -> None:
        """Readiness off, services down, then the inner connector."""
        if self._scheduler_side is not None:
            self._scheduler_side.stop()
        super().shutdown()

    def _worker_info(self, moe_layers: tuple[int, ...]) -> WorkerInfo:
        vllm_config = self._vllm_config
        model = vllm_config.model_config
        served = model.served_model_name
        hookless = self._role_of_worker is WorkerRole.DECODE and self._vllm_scheduler is None
        return WorkerInfo(
            worker_id=self._config.worker_id,
            incarnation=self._config.incarnation,
            role=self._role_of_worker,
            http_url=self._config.http_url,
            grpc_address=self._config.grpc_listen,
            geometry=ModelGeometry(
                moe_layers=moe_layers,
                experts=model.get_num_experts(),
                top_k=model.get_num_experts_per_tok(),
                fingerprint=model_fingerprint(model.hf_config.to_dict(), model.model, model.revision),
            ),
            served_model=served[0] if isinstance(served, list) else str(served),
            block_size=vllm_config.cache_config.block_size,
            engine_version=f"vllm {vllm.__version__}{', no scheduler hook' if hookless else ''}",
            max_model_len=model.max_model_len,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            kv_layout=f"{vllm_config.cache_config.cache_dtype}/{model.dtype}",
            hit_window_steps=self._config.hit_window_steps,
        )


class SchedulerTap:
    """What the patched scheduler calls; the decoder's state behind it appears when the workers are up."""

    def __init__(self, connector: SignatureHandoff) -> None:
        self._connector = connector

    def on_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """A step was planned."""
        state = self._connector.decode_scheduler
        if state is not None:
            state.on_schedule(scheduler_output)

    def on_update(self, scheduler_output: SchedulerOutput) -> None:
        """A step's results are in."""
        state = self._connector.decode_scheduler
        if state is not None:
            state.on_update(scheduler_output)
