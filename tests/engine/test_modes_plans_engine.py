"""What the scheduler's side asks of a step, and how reports find their plans, where drafts or overlap are involved."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from eldr.engine.config import EngineConfig
from eldr.engine.report import StepReport
from eldr.engine.scheduler_side import SchedulerSide
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.signature import ModelGeometry

pytestmark = pytest.mark.engine

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")
SIZE = 4


class Blocks:
    """A cache manager: the sliding group's blocks of a request are 100 above those of the full group."""

    usage = 0.0

    def __init__(self) -> None:
        self.block_pool = SimpleNamespace(get_new_blocks=lambda count: [])
        self.held: dict[str, list[int]] = {}

    def get_block_ids(self, request_id: str) -> tuple[list[int], list[int]]:
        return [block + 100 for block in self.held[request_id]], self.held[request_id]

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=self.get_block_ids(request_id))


@pytest.fixture
def make_side() -> Callable[..., tuple[SchedulerSide, Blocks]]:
    def make(
        drafts: bool = True, v2: bool = False, overlap: bool = False, role: WorkerRole = WorkerRole.PREFILL
    ) -> tuple[SchedulerSide, Blocks]:
        config = EngineConfig("w", "127.0.0.1:1", "http://127.0.0.1:1")
        info = WorkerInfo(
            "w", config.incarnation, role, config.http_url, config.grpc_listen, GEOMETRY, "m", SIZE
        )
        common = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        vllm_config = SimpleNamespace(
            use_v2_model_runner=v2,
            speculative_config=object() if drafts else None,
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Scheduler, async_scheduling=overlap),
        )
        groups = [
            KVCacheGroupSpec(["a"], SlidingWindowSpec(sliding_window=8, **common)),
            KVCacheGroupSpec(["b"], FullAttentionSpec(**common)),
        ]
        blocks = Blocks()
        side = SchedulerSide(
            config,
            info,
            vllm_config,
            KVCacheConfig(64, [], groups),
            blocks,
            SimpleNamespace(),
            can_release=True,
        )
        return side, blocks

    return make


def request(name: str, prompt: int, **params: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        num_computed_tokens=0,
        kv_transfer_params=params or None,
    )


def output(
    tokens: dict[str, int],
    new: dict[str, tuple[int, list[int]]] | None = None,
    cached: dict[str, tuple[int, list[int] | None]] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """A planned step: request -> first position, and the full group's new blocks."""

    def groups(blocks: list[int] | None) -> Any:
        return None if blocks is None else ([block + 100 for block in blocks], blocks)

    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=drafts or {},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=first, block_ids=groups(blocks))
            for name, (first, blocks) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[first for first, _ in cached.values()],
            new_block_ids=[groups(blocks) for _, blocks in cached.values()],
        ),
    )


def test_new_blocks_count_up_to_the_end_of_the_prompt(make_side: Callable[..., Any]) -> None:
    """Case 1.4: a prompt of 10 tokens in two chunks, then drafts that need a fourth block, then a resumption."""
    side, blocks = make_side()
    side.arrived(request("a", 10))
    blocks.held["a"] = [7, 3]
    assert side.plan(output({"a": 6}, new={"a": (0, [7, 3])})).limits == {}
    blocks.held["a"] = [7, 3, 9, 5]
    assert side.plan(output({"a": 4}, cached={"a": (6, [9, 5])})).limits == {9: 2, 5: 0}
    assert side.plan(output({"a": 3}, cached={"a": (10, None)})).limits == {}
    blocks.held["a"] = [7, 3, 9, 5, 8]
    assert side.plan(output({"a": 3}, cached={"a": (13, [8])})).limits == {8: 0}
    blocks.held["a"] = [7, 1, 2, 4]
    assert side.plan(output({"a": 10}, cached={"a": (4, [7, 1, 2, 4])})).limits == {2: 2, 4: 0}


def test_a_prompt_that_fills_its_blocks_limits_none_of_them(make_side: Callable[..., Any]) -> None:
    side, blocks = make_side()
    side.arrived(request("a", 8))
    blocks.held["a"] = [7, 3, 9]
    assert side.plan(output({"a": 8}, new={"a": (0, [7, 3, 9])})).limits == {9: 0}


@pytest.mark.parametrize("settings", [{"drafts": False}, {"role": WorkerRole.DECODE}])
def test_nothing_is_limited_without_drafts_or_without_rows(
    settings: dict[str, Any], make_side: Callable[..., Any]
) -> None:
    side, blocks = make_side(**settings)
    side.arrived(request("a", 6))
    blocks.held["a"] = [7, 3]
    assert side.plan(output({"a": 6}, new={"a": (0, [7, 3])})).limits == {}


def test_a_step_of_drafted_requests_is_a_decode_step_of_all_its_tokens(make_side: Callable[..., Any]) -> None:
    side, blocks = make_side(role=WorkerRole.DECODE)
    for name in "abc":
        side.arrived(request(name, 6))
        blocks.held[name] = [1, 2, 3, 4]
    step = output({"a": 3, "b": 1}, cached={"a": (8, None), "b": (5, None)}, drafts={"a": [11, 12]})
    plan = side.plan(step)
    assert (plan.tokens, plan.decode_tokens) == (4, 4)
    # Three tokens of a resumed request are recomputed, and no drafts.
    plan = side.plan(output({"a": 3, "c": 3}, cached={"a": (8, None), "c": (6, None)}, drafts={"a": [1, 2]}))
    assert (plan.tokens, plan.decode_tokens) == (6, 3)


def test_reports_find_their_plans_where_steps_overlap(make_side: Callable[..., Any]) -> None:
    """Asynchronous scheduling and pipelines: a second step is planned before the first one's report is in."""
    side, blocks = make_side(drafts=False, overlap=True)
    assert side.handoff is not None
    for name, prompt in (("a", 5), ("b", 7)):
        side.arrived(request(name, prompt))
        blocks.held[name] = [1, 2]
        side.plan(output({name: prompt}, new={name: (0, [1, 2])}))
    side.plan(output({}))
    for name, prompt in (("a", 5), ("b", 7)):
        counts = np.zeros((2, 8), np.int32)
        counts[:, [1, 4]] = 4
        side.reported(StepReport((0, 1), counts={name: counts}), set())
        signature = side.handoff.signature(name)
        assert signature is not None
        assert (signature.tokens, signature.covered_tokens) == (prompt, 4)
    side.reported(None, set())
    assert not side._in_flight


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_decode_counts_are_refused_where_positions_are_not_certain(
    v2: bool, drafts: bool, overlap: bool, make_side: Callable[..., Any]
) -> None:
    side, _ = make_side(v2=v2, drafts=drafts, overlap=overlap, role=WorkerRole.DECODE)
    side.arrived(request("a", 5, eldr_decode_counts=True))
    assert ("a" in side._counts) is not (v2 and drafts and overlap)
