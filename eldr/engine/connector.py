"""The KV connector that carries expert signatures: the user's own connector with capture and hand-off around it.

vLLM loads it by name: `"kv_connector": "EldrConnector", "kv_connector_module_path": "eldr.engine.connector"`. It
*is* a NixlPullConnector, so every seam that asks for the class keeps working.
"""

from dataclasses import dataclass
from typing import Any

import structlog
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from eldr.engine.capture import CaptureError
from eldr.engine.config import EngineConfig, EngineConfigError
from eldr.engine.fingerprint import model_fingerprint
from eldr.engine.nixl import set_progress_delay
from eldr.engine.report import StepReport
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


def check_parallelism(vllm_config: VllmConfig) -> None:
    """Raises CaptureError for layouts in which a KV block does not hold whole tokens of one rank."""
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise CaptureError(f"eldr does not capture under {name} > 1, got {getattr(parallel, name)}")


class EldrConnector(NixlPullConnector):  # type: ignore[misc]
    """NIXL pull connector with expert capture, block-indexed signature cache and signature hand-off."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._config = EngineConfig.from_extra_config(transfer.kv_connector_extra_config)
        self._role_of_worker = worker_role(vllm_config)
        check_parallelism(vllm_config)
        delay_us = self._config.nixl_progress_delay_us
        if delay_us is None and current_platform.is_cpu():
            delay_us = CPU_PROGRESS_DELAY_US
        if delay_us is not None and delay_us >= 0:
            transfer.kv_connector_extra_config.setdefault("num_threads", 0)
            set_progress_delay(delay_us)
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker: CaptureWorker | None = None
        self._scheduler_side: SchedulerSide | None = None
        self._vllm_scheduler: Any = None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Binds the capture before graphs are recorded."""
        super().register_kv_caches(kv_caches)
        self._worker = CaptureWorker(self._vllm_config, self.kv_cache_config, self._role_of_worker)
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

    def build_connector_worker_meta(self) -> StepReport | None:
        """The step's report to the scheduler."""
        plan: StepPlan | None = getattr(self._connector_metadata, "eldr_plan", None)
        if self._worker is None or plan is None:
            return None
        return self._worker.finish_step(plan)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are up: their layers give the geometry, and the worker's services start."""
        layers: set[int] = set()
        inner: dict[tuple[int, int], KVConnectorHandshakeMetadata] = {}
        for rank, handshake in metadata.items():
            assert isinstance(handshake, EldrHandshake)
            layers.update(handshake.moe_layers)
            if handshake.inner is not None:
                inner[rank] = handshake.inner
        super().set_xfer_handshake_metadata_pp_aware(inner)
        info = self._worker_info(tuple(sorted(layers)))
        self._scheduler_side = SchedulerSide(
            self._config, info, self._vllm_config, self.kv_cache_config, self._kv_cache_manager
        )
        if self._vllm_scheduler is not None:
            self._scheduler_side.watch(self._vllm_scheduler)
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

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Adds the step's plan to the inner connector's metadata."""
        side = self._scheduler_side
        if side is not None and side.handoff is not None:
            # A lease that has run out is what the inner connector releases by itself.
            for request_id in side.handoff.take_releases():
                self.connector_scheduler._reqs_need_send[request_id] = float("-inf")
        metadata = super().build_connector_meta(scheduler_output)
        if side is not None:
            metadata.eldr_plan = side.plan(scheduler_output)
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Reserves the signature's place in the answer's parameters."""
        held, params = super().request_finished_all_groups(request, block_ids)
        if self._scheduler_side is not None:
            params = self._scheduler_side.finished(request, held, params)
        return held, params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Reads the workers' report of the step."""
        super().update_connector_output(connector_output)
        if self._scheduler_side is not None:
            self._scheduler_side.reported(connector_output)

    def shutdown(self) -> None:
        """Readiness off, services down, then the inner connector."""
        if self._scheduler_side is not None:
            self._scheduler_side.stop()
        super().shutdown()

    def _worker_info(self, moe_layers: tuple[int, ...]) -> WorkerInfo:
        vllm_config = self._vllm_config
        model = vllm_config.model_config
        served = model.served_model_name
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
            engine_version=f"vllm {vllm.__version__}",
            max_model_len=model.max_model_len,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            kv_layout=f"{vllm_config.cache_config.cache_dtype}/{model.dtype}",
        )


class SchedulerTap:
    """What the patched scheduler calls; the decoder's state behind it appears when the workers are up."""

    def __init__(self, connector: EldrConnector) -> None:
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
