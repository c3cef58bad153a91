"""The patched scheduler against every order of prefill finish, abort and transfer notice (cases 2.3, 2.4).

A real scheduler with the real NIXL connector's scheduler side, no model and no worker: the test plays the
worker and reports what one would.
"""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eldr import patching

pytestmark = pytest.mark.engine

PROMPT_TOKENS = 40
BLOCK_TOKENS = 16
BLOCKS = 64

# A model's shape is all that a scheduler needs.
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


SCHEDULER = "vllm/v1/core/sched/scheduler.py"


@pytest.fixture(scope="module", autouse=True)
def installed() -> patching.Report:
    """The installed vLLM, which must have the series applied."""
    tree = patching.find_installed()
    report = patching.status(tree, patching.bundled_series())
    if report.state is not patching.TreeState.APPLIED:
        pytest.fail(f"vLLM in {tree.root} is {report.state}: run `eldr patch apply` with this interpreter")
    return report


class Engine:
    """A scheduler and the little that its engine core does around it."""

    def __init__(self, folder: Path, role: str, asynchronous: bool, scheduler_class: Any = None) -> None:
        import torch
        from vllm import config as vllm
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        (folder / "config.json").write_text(json.dumps(MODEL))
        config = vllm.VllmConfig(
            model_config=vllm.ModelConfig(
                model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256
            ),
            cache_config=vllm.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=vllm.SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, is_encoder_decoder=False
            ),
            device_config=vllm.DeviceConfig("cpu"),
            kv_transfer_config=vllm.KVTransferConfig(kv_connector="NixlConnector", kv_role=role),
        )
        # The CPU platform turns this off in the config; the scheduler itself does not mind.
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = (scheduler_class or config.scheduler_config.get_scheduler_cls())(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.pool.get_num_free_blocks()
        self.times_freed: Counter[int] = Counter()
        free_blocks = self.pool.free_blocks

        def counted(blocks: Any, **options: Any) -> None:
            freed = list(blocks)
            self.times_freed.update(block.block_id for block in freed)
            free_blocks(freed, **options)

        self.pool.free_blocks = counted

    def add(self, request_id: str, max_tokens: int, **transfer: Any) -> None:
        """A request of PROMPT_TOKENS tokens with these `kv_transfer_params`."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=max_tokens, extra_args={"kv_transfer_params": transfer})
        sampling.update_from_generation_config({}, None)
        tokens = list(range(PROMPT_TOKENS))
        self.scheduler.add_request(Request(request_id, tokens, sampling, None, block_hasher=self.hasher))

    def add_prefill(self, request_id: str) -> None:
        """A prefill leg: one token, KV held for a decoder."""
        self.add(request_id, 1, do_remote_decode=True)

    def add_decode(self, request_id: str) -> None:
        """A decode leg whose KV is to be pulled."""
        remote = {"remote_engine_id": "p", "remote_request_id": "r", "remote_host": "h", "remote_port": 1}
        self.add(request_id, 2, do_remote_prefill=True, remote_block_ids=[[1, 2, 3]], **remote)

    def plan(self) -> Any:
        """The next step, given to the workers."""
        return self.scheduler.schedule()

    def close(self, planned: Any) -> dict[str, Any]:
        """The step's results; the answers by request id."""
        return self._update(planned)

    def notice(self, sent: Collection[str] = (), received: Collection[str] = ()) -> None:
        """A step without requests that brings transfer notices."""
        from vllm.v1.core.sched.output import SchedulerOutput

        self._update(SchedulerOutput.make_empty(), set(sent), set(received))

    def abort(self, request_id: str) -> None:
        """The client went away."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def held_blocks(self) -> int:
        """KV blocks that are not free."""
        return int(self.free_at_start - self.pool.get_num_free_blocks())

    def _update(self, planned: Any, sent: Any = None, received: Any = None) -> dict[str, Any]:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        ids = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
            kv_connector_output=KVConnectorOutput(finished_sending=sent, finished_recving=received),
        )
        steps = self.scheduler.update_from_output(planned, output)
        return {answer.request_id: answer for step in steps.values() for answer in step.outputs}


Start = Callable[[str], Engine]


@pytest.fixture(params=[False, True], ids=["Scheduler", "AsyncScheduler"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Makes an engine of a role, with the synchronous and with the asynchronous scheduler."""

    def started(role: str) -> Engine:
        engine = Engine(tmp_path, role, request.param)
        assert type(engine.scheduler).__name__ == ("AsyncScheduler" if request.param else "Scheduler")
        return engine

    return started


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "abort", "sent"])), ids="-".join)
def test_blocks_are_freed_once_in_every_order_of_finish_abort_and_sent_notice(
    start: Start, order: tuple[str, ...]
) -> None:
    """Case 2.3."""
    engine = start("kv_producer")
    engine.add_prefill("r")
    planned = engine.plan()
    assert engine.held_blocks() == 3
    answers: dict[str, Any] = {}
    play = {
        "finish": lambda: answers.update(engine.close(planned)),
        "abort": lambda: engine.abort("r"),
        "sent": lambda: engine.notice(sent={"r"}),
    }
    for event in order:
        play[event]()
    assert engine.held_blocks() == 0
    assert sorted(engine.times_freed.values()) == [1, 1, 1]
    assert not engine.scheduler.requests
    assert not engine.scheduler.early_sent_kv_req_ids
    # A notice after the abort is late; one before the finish is kept, and nobody is led to freed blocks.
    late = order.index("abort") < min(order.index("finish"), order.index("sent"))
    assert engine.scheduler.num_late_kv_xfer_notices == late
    if order.index("finish") < order.index("abort"):
        handed_over = answers["r"].kv_transfer_params is not None
        assert handed_over == (order.index("finish") < order.index("sent"))
    assert_serves(engine)


def assert_serves(engine: Engine) -> None:
    """The engine goes on: one more prefill runs, and its blocks come back."""
    held = engine.held_blocks()
    engine.add_prefill("next")
    assert engine.close(engine.plan())["next"].kv_transfer_params["remote_request_id"] == "next"
    engine.notice(sent={"next"})
    assert engine.held_blocks() == held


def test_notices_for_unknown_requests_are_counted_and_logged_once_a_kind(start: Start) -> None:
    """Case 2.4."""
    from vllm.logger import _print_warning_once

    _print_warning_once.cache_clear()
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.v1.core.sched.scheduler")
    engine = start("kv_consumer")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            engine.notice(sent={"a", "b"}, received={"c"})
    finally:
        logger.removeHandler(handler)
    assert engine.scheduler.num_late_kv_xfer_notices == 9
    assert sorted(message.split(",")[0] for message in messages) == [
        "KV of a request was received",
        "KV of a request was sent",
    ]


def test_a_pull_that_ends_after_its_request_was_aborted_frees_the_blocks_once(start: Start) -> None:
    """Case 2.4: the blocks stay while the transfer may still write them; a second notice changes nothing."""
    engine = start("kv_consumer")
    engine.add_decode("r")
    engine.close(engine.plan())
    engine.abort("r")
    assert engine.held_blocks() == 3
    engine.notice(received={"r"})
    assert engine.held_blocks() == 0
    engine.notice(received={"r"})
    assert sorted(engine.times_freed.values()) == [1, 1, 1]
    assert engine.scheduler.num_late_kv_xfer_notices == 1


def test_a_second_received_notice_does_not_disturb_the_running_request(start: Start) -> None:
    """Case 2.4, the request being alive."""
    engine = start("kv_consumer")
    engine.add_decode("r")
    engine.close(engine.plan())
    engine.notice(received={"r"})
    planned = engine.plan()
    assert planned.num_scheduled_tokens == {"r": 1}
    engine.notice(received={"r"})
    assert engine.scheduler.num_late_kv_xfer_notices == 1
    engine.close(planned)
    assert engine.close(engine.plan())["r"].finish_reason is not None
    assert engine.held_blocks() == 0
    assert set(engine.times_freed.values()) == {1}


def test_a_lease_that_ends_after_the_pull_does_not_free_twice(start: Start) -> None:
    """Case 2.3: both notices name a request that has finished."""
    engine = start("kv_producer")
    engine.add_prefill("r")
    engine.close(engine.plan())
    engine.notice(sent={"r"})
    engine.notice(sent={"r"})
    assert sorted(engine.times_freed.values()) == [1, 1, 1]
    assert engine.scheduler.num_late_kv_xfer_notices == 1


def test_the_scheduler_without_the_series_ends_on_an_unknown_request(
    installed: patching.Report, tmp_path: Path
) -> None:
    """The reason for the patch. When this fails after a vLLM upgrade, the patch can go."""
    (file,) = [file for file in installed.files if file.path == SCHEDULER]
    upstream = ModuleType("upstream_scheduler")
    exec(compile(file.upstream, SCHEDULER, "exec"), upstream.__dict__)
    engine = Engine(tmp_path, "kv_consumer", False, upstream.Scheduler)
    with pytest.raises(AssertionError):
        engine.notice(received={"gone"})
