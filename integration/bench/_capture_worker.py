"""One engine of integration/bench/capture.py, alone in its process: commands and answers are JSON lines.

    python -m integration.bench._capture_worker SETTINGS

Times are CPU seconds of the whole process: engine, connector threads and gRPC server.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

PROGRESS_DELAY_US = 1000
"""Pause of NIXL's progress thread, which otherwise spins a core: the same with and without eldr."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`eldr` and `stages`: with signatures, and with a stopwatch in eldr's functions (not for overheads)."""

    model: str
    kv_role: str
    eldr: bool
    stages: bool
    grpc_port: int
    nixl_port: int
    block_size: int
    max_num_seqs: int


@dataclass(slots=True)
class Stopwatch:
    """Exclusive CPU seconds of the calling thread in wrapped functions, by stage."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)

    def wrap(self, owner: type, name: str, stage: str) -> None:
        """Replaces a method by one that is timed."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                whole = time.thread_time() - begin
                self.seconds[stage] = self.seconds.get(stage, 0.0) + whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


def watch_stages() -> Stopwatch:
    """Times eldr's functions by the stage of the paper that they belong to; before an engine is built."""
    from eldr.engine.capture import EagerCapturer
    from eldr.engine.kernels.vectorised import Ready
    from eldr.engine.scheduler_side import SchedulerSide
    from eldr.engine.worker import CaptureWorker

    stopwatch = Stopwatch()
    for owner, name, stage in (
        (EagerCapturer, "capture", "hook"),
        (CaptureWorker, "note_forward", "hook"),
        (CaptureWorker, "finish_step", "reduce"),
        (Ready, "result", "copy"),
        (SchedulerSide, "plan", "fetch"),
        (SchedulerSide, "finished", "fetch"),
        (SchedulerSide, "reported", "fetch"),
    ):
        stopwatch.wrap(owner, name, stage)
    return stopwatch


def transfer_config(settings: WorkerSettings) -> dict[str, Any]:
    """--kv-transfer-config: NIXL's pull connector, with eldr around it or alone."""
    # eldr asks for this too, where the user does not.
    extra: dict[str, Any] = {"num_threads": 0}
    transfer = {"kv_connector": "NixlPullConnector", "kv_role": settings.kv_role, "kv_buffer_device": "cpu"}
    if settings.eldr:
        extra["eldr"] = {
            "worker_id": settings.kv_role,
            "grpc_listen": f"127.0.0.1:{settings.grpc_port}",
            "http_url": "http://127.0.0.1:1",
            "nixl_progress_delay_us": PROGRESS_DELAY_US,
        }
        transfer |= {"kv_connector": "EldrConnector", "kv_connector_module_path": "eldr.engine.connector"}
    return transfer | {"kv_connector_extra_config": extra}


class Engine:
    """An engine and what is asked of it."""

    def __init__(self, settings: WorkerSettings) -> None:
        from vllm import LLM

        from eldr.engine.nixl import set_progress_delay

        self._stopwatch = watch_stages() if settings.stages else None
        if not settings.eldr:
            set_progress_delay(PROGRESS_DELAY_US)
        self._llm = LLM(
            model=settings.model,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            kv_cache_memory_bytes=1 << 28,
            kv_transfer_config=transfer_config(settings),
            seed=0,
        )
        self._core = self._llm.llm_engine
        self._batch = self._batches = 0

    def prefill(self, prompt: list[int], handoff: bool) -> dict[str, Any]:
        """One prompt of its own, one token out; with `handoff` as the prefill leg of a P/D request."""
        params = self._sampling(
            1, {"do_remote_decode": True, "do_remote_prefill": False} if handoff else None
        )
        begin = time.process_time()
        (answer,) = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        cpu_s = time.process_time() - begin
        stages = self._stopwatch.take() if self._stopwatch else {}
        signature = (answer.kv_transfer_params or {}).get("eldr_signature")
        return {"cpu_s": cpu_s, "signature": signature, "stages": stages}

    def begin(self, prompts: list[list[int]], tokens: int, counts: bool) -> dict[str, Any]:
        """Starts a batch and runs it until every request decodes. `counts`: per-request decode counts too."""
        params = self._sampling(tokens, {"eldr_decode_counts": True} if counts else None)
        self._batch = len(prompts)
        self._batches += 1
        for i, ids in enumerate(prompts):
            self._core.add_request(f"batch-{self._batches}-{i}", {"prompt_token_ids": ids}, params)
        started: set[str] = set()
        while len(started) < self._batch:
            started |= {output.request_id for output in self._core.step() if output.outputs[0].token_ids}
        return {}

    def steps(self, count: int) -> dict[str, Any]:
        """`count` steps of the batch."""
        begin = time.process_time()
        batches = [len(self._core.step()) for _ in range(count)]
        cpu_s = time.process_time() - begin
        if batches != [self._batch] * count:
            raise RuntimeError(f"decode steps of {self._batch} requests each, got {batches}")
        return {"cpu_s": cpu_s}

    def end_batch(self) -> dict[str, Any]:
        """Ends the batch where it stands."""
        self._core.abort_request([f"batch-{self._batches}-{i}" for i in range(self._batch)])
        while self._core.has_unfinished_requests():
            self._core.step()
        return {}

    def close(self) -> None:
        """Ends the engine."""
        self._core.engine_core.shutdown()

    @staticmethod
    def _sampling(tokens: int, transfer: dict[str, Any] | None) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": transfer} if transfer else None
        return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra)


def serve(engine: Engine, commands: TextIO, answers: TextIO) -> None:
    """Runs commands until there are no more."""
    calls: dict[str, Callable[..., dict[str, Any]]] = {
        "prefill": engine.prefill,
        "begin": engine.begin,
        "steps": engine.steps,
        "end_batch": engine.end_batch,
    }
    for line in commands:
        command = json.loads(line)
        answer = calls[command.pop("do")](**command)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    settings = WorkerSettings(**json.loads(sys.argv[1]))
    # NIXL binds its thread, which computes too, to the last core, and eldr undoes that; here nothing shall differ.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ.update(ENVIRONMENT, VLLM_NIXL_SIDE_CHANNEL_PORT=str(settings.nixl_port))
    # The pipe is ours alone: what libraries print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = Engine(settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        serve(engine, sys.stdin, answers)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
