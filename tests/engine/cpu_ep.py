"""Test-only: expert parallelism and EPLB on vLLM's CPU build, for correctness and not for speed.

`worker_cls="cpu_ep.ExpertParallelWorker"` in every worker, and `allow_eplb` in the process that makes the engine.
The CPU build lacks: expert maps in its MoE kernel, the mapping to physical experts, the registration of the model
with EPLB, and streams and events to synchronise with.

Placements come from outside: the newest plan of rank r is the file `<r>.json` in the folder that PLANS names.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import parallel
from vllm.distributed.eplb import policy
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.eplb.policy.abstract import AbstractEplbPolicy
from vllm.distributed.parallel_state import get_ep_group
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router import base_router
from vllm.model_executor.models.interfaces import get_mixture_of_experts_model
from vllm.v1.worker.cpu_worker import CPUWorker

from eldr.engine.expert_plan import ExpertPlan, common_version

PLANS = "ELDR_TEST_PLANS"


def allow_eplb(patch: pytest.MonkeyPatch) -> None:
    """Lets a configuration with EPLB pass on a CPU build."""

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def is_cuda_alike(self) -> bool:
            return True

    real = parallel.current_platform
    patch.setattr(parallel, "current_platform", Platform())


class PlanPolicy(AbstractEplbPolicy):
    """Takes the placement from pushed plans instead of the load: the newest one that every rank has."""

    version = 0

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Called by every rank in the same step."""
        assert old_global_expert_indices is not None
        group = get_ep_group()
        plans: dict[int, dict[str, list[int]]] = {0: {}}
        path = Path(os.environ[PLANS]) / f"{group.rank_in_group}.json"
        if path.exists():
            plans.update({int(version): slots for version, slots in json.loads(path.read_text()).items()})
        newest: list[int] = [0] * num_ranks
        torch.distributed.all_gather_object(newest, max(plans), group=group.cpu_group)
        agreed = common_version(newest)
        if agreed == cls.version:
            return old_global_expert_indices
        cls.version = agreed
        plan = ExpertPlan(agreed, {int(layer): slots for layer, slots in plans[agreed].items()})
        layers, experts = weight.shape
        return torch.from_numpy(plan.physical_to_logical(range(layers), experts, num_ranks))


def placement_of(worker: Any) -> tuple[int, list[int]]:
    """In a worker: the version of the applied plan, and the logical expert in each slot of the first MoE layer."""
    (state,) = worker.worker.model_runner.eplb_state.model_states.values()
    return PlanPolicy.version, state.physical_to_logical_map[0].tolist()


class _Timeless:
    """Stands for streams and events, of which a CPU has none."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _: object) -> float:
        return 0.0


def _map_to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each pick goes to one of its expert's replicas, by position, the same one on every rank."""
    ids = topk_ids.long()
    position = torch.arange(ids.numel()).view_as(ids)
    physical = logical_to_physical_map[ids, position % logical_replica_count[ids]]
    return physical.to(topk_ids.dtype)


class ExpertParallelWorker(CPUWorker):
    """A CPU worker whose process knows expert maps and, where it is on, EPLB."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        run = CPUUnquantizedExperts.apply

        def apply(
            self: Any,
            output: torch.Tensor,
            hidden_states: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            activation: Any,
            global_num_experts: int,
            expert_map: torch.Tensor | None,
            *rest: Any,
            **options: Any,
        ) -> None:
            if expert_map is not None:
                local = expert_map[topk_ids.long()]
                topk_weights = topk_weights.masked_fill(local < 0, 0.0)
                topk_ids = local.clamp_min(0).to(topk_ids.dtype)
            run(
                self,
                output,
                hidden_states,
                w1,
                w2,
                topk_weights,
                topk_ids,
                activation,
                global_num_experts,
                expert_map,
                *rest,
                **options,
            )

        CPUUnquantizedExperts.apply = apply
        base_router.eplb_map_to_physical_and_record = _map_to_physical
        policy.EPLB_POLICIES["default"] = PlanPolicy
        torch.Event = _Timeless
        torch.accelerator.current_stream = _Timeless
        super().__init__(*args, **kwargs)

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        runner = self.model_runner
        if self.parallel_config.enable_eplb:
            runner._moe_model = get_mixture_of_experts_model(runner.model)
            runner.eplb_state = EplbState(self.parallel_config, runner.device)
            runner.eplb_state.add_model(runner._moe_model, runner.model_config)
