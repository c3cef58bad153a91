"""What the capture binds, which rows of a batch it takes, and what it refuses at start. No engine is run."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode
from vllm.distributed import parallel_state
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from eldr.engine.capture import (
    NOT_CAPTURED,
    CaptureError,
    Capturer,
    EagerCapturer,
    capturer_for,
    check_supported,
    target_moe_layers,
)
from eldr.engine.kv_group import signature_group

pytestmark = pytest.mark.engine

MAX_TOKENS, TOP_K = 32, 2


class Router(BaseRouter):
    """A router that is only asked for its callback."""

    def __init__(self) -> None:
        self.capture_fn = None

    @property
    def routing_method_type(self) -> Any:
        raise NotImplementedError

    def _compute_routing(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


class Layer(MoERunner):
    """A MoE layer without weights."""

    layer_id = 0
    router = None
    _quant_method = None

    def __init__(self, layer_id: int, kernel: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.layer_id = layer_id
        self.router = Router()
        self._quant_method = SimpleNamespace(
            is_monolithic=kernel is not None,
            moe_kernel=SimpleNamespace(impl=SimpleNamespace(fused_experts=kernel)),
        )


def config_of(layers: dict[str, Any], hidden_layers: int = 4, dp_rank: int = 0, tp: int = 1) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="a-model",
            get_total_num_hidden_layers=lambda: hidden_layers,
            get_num_experts=lambda: 8,
            get_num_experts_per_tok=lambda: TOP_K,
        ),
        parallel_config=SimpleNamespace(data_parallel_rank=dp_rank, tensor_parallel_size=tp),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def capturer_of(dp_rank: int = 0, tp: int = 1) -> Capturer:
    return Capturer(config_of({"a": Layer(0), "b": Layer(2)}, dp_rank=dp_rank, tp=tp))


def batch(counts: list[int] | None, shards: list[int] | None = None) -> AbstractContextManager[None]:
    """A forward pass of data-parallel ranks with these tokens; shards as expert parallelism gathers them."""
    metadata = None
    if counts is not None:
        metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(counts), local_sizes=shards)
    return override_forward_context(SimpleNamespace(dp_metadata=metadata))


def rows(first: int, count: int) -> torch.Tensor:
    """Distinguishable rows; -7 is padding."""
    return torch.arange(first, first + count).repeat(TOP_K, 1).T.contiguous()


PADDING = -7


@pytest.fixture
def tensor_parallel(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], None]:
    """Makes the all-gather of the tensor-parallel group return a given tensor."""

    def gathers(whole: torch.Tensor) -> None:
        group = SimpleNamespace(all_gather=lambda _local, dim: whole)
        monkeypatch.setattr(routed_experts_capturer, "get_tp_group", lambda: group)

    return gathers


def layouts(
    counts: list[int], tp: int
) -> Iterator[tuple[str, int, torch.Tensor, list[int] | None, torch.Tensor | None]]:
    """Per rank and layout that vLLM 0.32.0 has: name, rank, what its router sees, shard sizes, what TP gathers."""
    begins = [0, *itertools.accumulate(counts)]
    tokens = [rows(begin, count) for begin, count in zip(begins, counts, strict=False)]
    for rank, own in enumerate(tokens):
        yield "all ranks' tokens one after another", rank, torch.cat(tokens), None, None
        yield "own tokens only", rank, own, None, None
        if tp == 1:
            continue
        sharded = [pad(own_tokens, tp) for own_tokens in tokens]
        shards = [len(whole) // tp for whole in sharded for _ in range(tp)]
        yield "shards of all ranks, each padded", rank, torch.cat(sharded), shards, None
        # That of the first tensor-parallel rank, which is the one that reports.
        yield "own shard of a sequence-parallel batch", rank, sharded[rank].chunk(tp)[0], None, sharded[rank]


def pad(tokens: torch.Tensor, tp: int) -> torch.Tensor:
    missing = -len(tokens) % tp
    return torch.cat([tokens, torch.full((missing, TOP_K), PADDING)])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("counts", [[3, 5], [5, 3], [4, 4], [1, 7], [6, 1], [2, 9, 4]])
def test_every_data_parallel_rank_takes_its_own_rows_in_every_layout(
    counts: list[int], tp: int, tensor_parallel: Callable[[torch.Tensor], None]
) -> None:
    """Case 1.9, and padding of sequence parallelism (1.7)."""
    for name, rank, seen, shards, whole in layouts(counts, tp):
        if whole is not None:
            tensor_parallel(whole)
        capturer = capturer_of(rank, tp)
        with batch(counts, shards):
            capturer.capture(2, seen)
        expected = rows(sum(counts[:rank]), counts[rank])
        found = capturer.picks(counts[rank])
        assert torch.equal(found[:, 1], expected.to(torch.int32)), f"{name}, rank {rank}"
        assert (found[:, 0] == NOT_CAPTURED).all()
        assert capturer.take_misses() == 0


@pytest.mark.parametrize("seen", [7, 10, 16, 40])
def test_a_row_count_that_fits_no_layout_is_a_miss_and_leaves_nothing(seen: int) -> None:
    """Cases 1.9 and 1.10: 2 x 5 padded rows for ranks of 3 and 5 tokens, warm-up sizes, more than any step has."""
    capturer = capturer_of(dp_rank=1)
    with batch([3, 5]):
        capturer.capture(0, rows(0, 8))
        capturer.capture(0, rows(0, seen))
    assert (capturer.device_buffer[:, 0] == NOT_CAPTURED).all()
    assert (capturer.misses, capturer.take_misses(), capturer.take_misses()) == (1, 1, 0)


def test_padding_beyond_the_largest_step_is_left_out() -> None:
    """Cases 1.7 and 1.10: a graph's padded batch may exceed what the scheduler ever plans."""
    capturer = capturer_of()
    with batch(None):
        capturer.capture(0, rows(0, MAX_TOKENS + 3))
    assert torch.equal(capturer.picks(MAX_TOKENS)[:, 0], rows(0, MAX_TOKENS).to(torch.int32))


def test_a_replayed_graph_writes_the_buffer_that_was_there_at_its_recording() -> None:
    """Case 1.21: no allocation and no new address between steps, so a replay writes where a step reads."""
    capturer = capturer_of()
    address = capturer.device_buffer.data_ptr()
    for first in (0, 100):
        with batch(None):
            capturer.capture(0, rows(first, 4))
        assert capturer.picks(4)[:, 0, 0].tolist() == list(range(first, first + 4))
        assert capturer.picks(4).data_ptr() == address
        capturer.clear(4)


def eager_capturer() -> EagerCapturer:
    return EagerCapturer(config_of({"a": Layer(0), "b": Layer(2)}))


def test_an_eager_engine_keeps_the_ids_of_the_real_tokens() -> None:
    capturer = eager_capturer()
    capturer.begin_step()
    capturer.capture(2, rows(10, 5))
    capturer.capture(0, rows(0, 5))
    picks = capturer.picks(3)
    assert [layer[:, 0].tolist() for layer in picks] == [[0, 1, 2], [10, 11, 12]]


@pytest.mark.parametrize("forgotten_by", ["clear", "begin_step"])
def test_a_layer_that_bypassed_an_eager_step_shows_as_missing(forgotten_by: str) -> None:
    """Cases 1.3 and 1.6: what an earlier step or a warm-up left is no pick of this one."""
    capturer = eager_capturer()
    capturer.capture(0, rows(0, 4))
    capturer.capture(2, rows(0, 4))
    capturer.clear(4) if forgotten_by == "clear" else capturer.begin_step()
    capturer.capture(2, rows(10, 4))
    picks = capturer.picks(4)
    assert isinstance(picks, torch.Tensor)
    assert (picks[:, 0] == NOT_CAPTURED).all()
    assert picks[:, 1, 0].tolist() == [10, 11, 12, 13]


def test_an_eager_layer_that_saw_fewer_tokens_covers_only_those() -> None:
    capturer = eager_capturer()
    capturer.capture(0, rows(0, 4))
    capturer.capture(2, rows(10, 2))
    picks = capturer.picks(4)
    assert isinstance(picks, torch.Tensor)
    assert picks[:, 1, 0].tolist() == [10, 11, NOT_CAPTURED, NOT_CAPTURED]


def test_only_an_eager_engine_that_sees_its_own_tokens_keeps_references() -> None:
    for mode, parallel, kind in [
        (CompilationMode.NONE, 1, EagerCapturer),
        (CompilationMode.NONE, 2, Capturer),
        (CompilationMode.VLLM_COMPILE, 1, Capturer),
    ]:
        config = config_of({"a": Layer(0)})
        config.compilation_config.mode = mode
        config.parallel_config.data_parallel_size = parallel
        assert type(capturer_for(config)) is kind


def test_only_layers_of_the_target_are_bound() -> None:
    """Case 1.4: a draft model's layers clash with the target's indices or follow them."""
    layers = {
        "model.layers.0.mlp": Layer(0),
        "model.layers.1.self_attn": object(),
        "model.layers.1.mlp": Layer(1),
        "draft.layers.0.mlp": Layer(0),
        "mtp.layers.2.mlp": Layer(2),
    }
    found = target_moe_layers(config_of(layers, hidden_layers=2))
    assert found == {0: layers["model.layers.0.mlp"], 1: layers["model.layers.1.mlp"]}
    capturer = Capturer(config_of(layers, hidden_layers=2))
    assert capturer.layers == (0, 1)
    assert layers["draft.layers.0.mlp"].router.capture_fn is None
    assert layers["mtp.layers.2.mlp"].router.capture_fn is None
    with batch(None):
        layers["model.layers.0.mlp"].router.capture_fn(rows(0, 3))
        layers["model.layers.1.mlp"].router.capture_fn(rows(10, 3))
    assert capturer.picks(3)[:, :, 0].tolist() == [[0, 10], [1, 11], [2, 12]]


def test_a_monolithic_kernel_is_refused_by_name() -> None:
    """Case 1.6."""

    class SealedExperts:
        pass

    with pytest.raises(CaptureError, match="SealedExperts"):
        Capturer(config_of({"a": Layer(0, SealedExperts())}))


def test_a_model_without_moe_layers_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="a-model has no MoE layer"):
        Capturer(config_of({}))


def parallel_config(**settings: Any) -> Any:
    parallel = {
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        **settings,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"use_ubatching": True}, "--enable-dbo"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, "--data-parallel-rank"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, "rank"),
    ],
)
def test_layouts_in_which_capture_is_wrong_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(CaptureError, match=named):
        check_supported(parallel_config(**settings))


def test_one_server_for_each_data_parallel_rank_is_supported() -> None:
    check_supported(parallel_config(data_parallel_size=2, data_parallel_external_lb=True))
    check_supported(parallel_config(data_parallel_size=2, data_parallel_hybrid_lb=True))


def test_compilation_on_a_cpu_build_is_refused_with_what_to_do() -> None:
    """There the layers are traced before the capture is bound, and nothing would ever be captured."""
    config = parallel_config()
    config.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE
    with pytest.raises(CaptureError, match="--enforce-eager"):
        check_supported(config)


def test_the_signature_follows_the_full_attention_group_by_kind() -> None:
    """Case 1.3."""
    common = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    sliding = SlidingWindowSpec(block_size=16, sliding_window=32, **common)
    full = FullAttentionSpec(block_size=16, **common)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    latent = MLAAttentionSpec(block_size=64, **common)

    def groups(*specs: Any) -> KVCacheConfig:
        named = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named)

    assert signature_group(groups(full)).index == 0
    found = signature_group(groups(sliding, state, full))
    assert (found.index, found.layer_name, found.block_size) == (2, "layer2", 16)
    assert signature_group(groups(state, latent)).index == 1
    with pytest.raises(CaptureError, match=r"SlidingWindowSpec.*MambaSpec"):
        signature_group(groups(sliding, state))
    packed = MLAAttentionSpec(block_size=64, tokens_per_state=4, model_version="deepseek_v4", **common)
    with pytest.raises(CaptureError, match="slot per token"):
        signature_group(groups(packed))
    replayed = SlidingWindowMLASpec(block_size=64, sliding_window=64, bounded_replay=True, **common)
    with pytest.raises(CaptureError, match="bounded replay"):
        signature_group(groups(full, replayed))


def test_no_distributed_group_is_needed_to_choose_rows() -> None:
    """What this file relies on: only sequence-parallel shards ask for the tensor-parallel group."""
    assert parallel_state._TP is None
