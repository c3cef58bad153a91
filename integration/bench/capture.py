"""What eldr costs inside the engine: prefill, decode steps, time to first token, memory and bytes.

    python -m integration.bench capture [--pairs 60] [--json FILE]

Two CPU engines in processes of their own, one with NIXL's pull connector and one with eldr around it, take turns on
the same work in random order; they serve the testbed model with its experts inflated to width 2048. A pair is the
process CPU time of both for the same work: one prompt of 512 tokens that neither has seen (prefill), the same as the
prefill leg of a P/D request plus the gateway's and the router's work on the hand-off (ttft), or a few decode steps
of the same batch (decode). Figures are the median extra fraction over the pairs (0.01 = 1 % more) and its 95 %
bootstrap interval. The stages are measured in a third engine, with a stopwatch in eldr's functions.
"""

import argparse
import json
import logging
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eldr.cluster.ports import free_ports
from eldr.rpc.codec import signature_from_text
from eldr.signature.geometry import ModelGeometry
from integration.bench._capture_worker import WorkerSettings
from integration.bench._handoff import Router
from integration.bench._inputs import TESTBED, WIDTH, inflated_testbed, prompts_of_length
from integration.bench._overhead import QWEN3_30B_A3B, CacheShape, Overhead, overhead, row_over_kv

PREFILL_TOKENS = 512
START_LIMIT_S = 300.0
WARM_UP = 3
STAGES = ("hook", "reduce", "copy", "fetch", "route")
GOALS = {"prefill": 0.01, "decode": 0.01, "ttft": 0.005}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `pairs` of each kind; a decode pair is `steps` steps of `batch` requests."""

    model: Path
    pairs: int
    steps: int
    batch: int
    tokens: int
    block_size: int
    decode_counts: bool
    seed: int


class Worker:
    """The process of one engine."""

    def __init__(self, settings: WorkerSettings, log: Path) -> None:
        self.settings = settings
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "integration.bench._capture_worker", json.dumps(asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=TESTBED.parents[1],
            )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._died()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def wait_ready(self) -> None:
        """Until the engine is up."""
        timer = threading.Timer(START_LIMIT_S, self._process.kill)
        timer.start()
        try:
            self.answer()
        finally:
            timer.cancel()

    def close(self) -> None:
        """Ends the process: without more commands it goes by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _died(self) -> None:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"capture: an engine ended; the last lines of its log:\n{tail}")


@contextmanager
def engines(plan: Plan, kv_role: str, kinds: tuple[str, ...]) -> Iterator[list[Worker]]:
    """Engines of `kinds` ("stock", "eldr", "stages"), all up."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for kind in kinds:
            grpc_port, nixl_port = free_ports(2)
            settings = WorkerSettings(
                str(plan.model),
                kv_role,
                kind != "stock",
                kind == "stages",
                grpc_port,
                nixl_port,
                plan.block_size,
                plan.batch,
            )
            workers.append(Worker(settings, folder / f"{kind}.log"))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.wait_ready()
        yield workers


@contextmanager
def watched(port: int) -> Iterator[None]:
    """Reads a decoder's state stream, as a router does."""
    import grpc

    from eldr.v1 import decode_pb2, decode_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.WatchState(decode_pb2.WatchStateRequest(period_s=0.5))

        def read() -> None:
            try:
                for _ in stream:
                    pass
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:
                    raise

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            stream.cancel()
            reader.join(5)


@dataclass(frozen=True, slots=True)
class Bench:
    """The measurements over one supply of prompts."""

    plan: Plan
    prompts: Iterator[list[int]]
    order: random.Random

    def in_turn(self, workers: list[Worker], do: str, **arguments: Any) -> list[dict[str, Any]]:
        """The same command to each worker, one at a time in random order; answers in the order of `workers`."""
        answers: list[dict[str, Any]] = [{} for _ in workers]
        for place in self.order.sample(range(len(workers)), len(workers)):
            answers[place] = workers[place].ask(do, **arguments)
        return answers

    def prefill(self) -> dict[str, Any]:
        """Prefill and TTFT pairs, signature bytes."""
        prefill: list[tuple[float, float]] = []
        ttft: list[tuple[float, float]] = []
        sizes = []
        router: Router | None = None
        with engines(self.plan, "kv_producer", ("stock", "eldr")) as workers:
            for turn in track(range(WARM_UP + self.plan.pairs), "prefill and ttft pairs"):
                stock, eldr = self.in_turn(workers, "prefill", prompt=next(self.prompts), handoff=False)
                stock_leg, eldr_leg = self.in_turn(
                    workers, "prefill", prompt=next(self.prompts), handoff=True
                )
                text = eldr_leg["signature"]
                if router is None:
                    router = router_for(text)
                route_s = router.route(text, PREFILL_TOKENS)
                if turn >= WARM_UP:
                    prefill.append((stock["cpu_s"], eldr["cpu_s"]))
                    ttft.append((stock_leg["cpu_s"], eldr_leg["cpu_s"] + route_s))
                    sizes.append(len(text))
        return {"prefill": prefill, "ttft": ttft, "signature_bytes": statistics.median(sizes)}

    def decode(self) -> list[tuple[float, float]]:
        """Decode pairs: the same steps of the same batch, one batch after the other."""
        plan, pairs = self.plan, list[tuple[float, float]]()
        with (
            engines(plan, "kv_consumer", ("stock", "eldr")) as workers,
            watched(workers[1].settings.grpc_port),
        ):
            per_batch = plan.tokens // plan.steps
            for _ in track(range(-(-plan.pairs // per_batch)), "batches of decode pairs"):
                prompt, size = next(self.prompts), PREFILL_TOKENS // plan.batch
                batch = [prompt[i * size : (i + 1) * size] for i in range(plan.batch)]
                for worker, counts in zip(workers, (False, plan.decode_counts), strict=True):
                    worker.ask("begin", prompts=batch, tokens=plan.tokens + 8, counts=counts)
                self.in_turn(workers, "steps", count=WARM_UP)
                for _ in range(min(per_batch, plan.pairs - len(pairs))):
                    stock, eldr = self.in_turn(workers, "steps", count=plan.steps)
                    pairs.append((stock["cpu_s"], eldr["cpu_s"]))
                self.in_turn(workers, "end_batch")
        return pairs

    def stages(self) -> dict[str, float]:
        """Median CPU milliseconds of each stage over prefill legs."""
        seen: dict[str, list[float]] = {stage: [] for stage in STAGES}
        router: Router | None = None
        with engines(self.plan, "kv_producer", ("stages",)) as (worker,):
            for turn in track(range(WARM_UP + min(20, self.plan.pairs)), "stages"):
                leg = worker.ask("prefill", prompt=next(self.prompts), handoff=True)
                if router is None:
                    router = router_for(leg["signature"])
                leg["stages"]["route"] = router.route(leg["signature"], PREFILL_TOKENS)
                if turn >= WARM_UP:
                    for stage in STAGES:
                        seen[stage].append(leg["stages"].get(stage, 0.0) * 1e3)
        return {stage: round(statistics.median(values), 4) for stage, values in seen.items()}


def router_for(text: str) -> Router:
    """A router for the model of this signature."""
    signature = signature_from_text(text)
    layers, experts = signature.shape
    return Router(ModelGeometry(tuple(range(layers)), experts, signature.top_k, signature.fingerprint))


def cache_ratio(shape: CacheShape) -> float:
    """Bytes of the signature cache over those of the KV cache."""
    from eldr.engine.signature_cache import SignatureCache

    row = SignatureCache(1, shape.moe_layers, shape.experts, shape.block_size, "cpu").nbytes
    return row_over_kv(shape, row)


def testbed_shape(block_size: int) -> CacheShape:
    """Shape of the testbed's KV cache."""
    config = json.loads((TESTBED / "model/config.json").read_text())
    layers = config["num_hidden_layers"]
    return CacheShape(
        layers=layers,
        moe_layers=layers,
        experts=config["num_local_experts"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        element_bytes=2,
        block_size=block_size,
    )


def measured(plan: Plan) -> dict[str, Any]:
    """Everything, by the keys of the JSON file."""
    bench = Bench(plan, prompts_of_length(plan.model, PREFILL_TOKENS, plan.seed), random.Random(plan.seed))
    decode = bench.decode()
    stages = bench.stages()
    prefill = bench.prefill()
    pairs = {"prefill": prefill["prefill"], "decode": decode, "ttft": prefill["ttft"]}
    found: dict[str, Overhead] = {
        name: overhead([stock for stock, _ in both], [eldr for _, eldr in both])
        for name, both in pairs.items()
    }
    result: dict[str, Any] = {}
    for name, figure in found.items():
        result[f"{name}_overhead"] = round(figure.median, 5)
        result[f"{name}_overhead_ci"] = round(figure.high, 5)
        result[f"{name}_overhead_low"] = round(figure.low, 5)
        result[f"{name}_stock_ms"] = round(statistics.median(stock for stock, _ in pairs[name]) * 1e3, 2)
    result["decode_stock_ms"] = round(result["decode_stock_ms"] / plan.steps, 2)
    return result | {
        "cache_over_kv": round(cache_ratio(QWEN3_30B_A3B), 6),
        "cache_over_kv_testbed": round(cache_ratio(testbed_shape(plan.block_size)), 6),
        "signature_bytes": prefill["signature_bytes"],
        "breakdown_ms": stages,
    }


def table(result: dict[str, Any], plan: Plan) -> Table:
    """The figures as people read them."""
    out = Table("measure", "value", "95 % interval", "goal", title=f"{plan.pairs} pairs, process CPU time")
    labels = {
        "prefill": f"prefill of {PREFILL_TOKENS} tokens, stock {result['prefill_stock_ms']} ms",
        "decode": f"decode step of {plan.batch}, stock {result['decode_stock_ms']} ms",
        "ttft": f"prefill leg and hand-off, stock {result['ttft_stock_ms']} ms",
    }
    for name, label in labels.items():
        low, high = result[f"{name}_overhead_low"], result[f"{name}_overhead_ci"]
        out.add_row(
            label, f"{result[f'{name}_overhead']:+.2%}", f"{low:+.2%} to {high:+.2%}", f"{GOALS[name]:.1%}"
        )
    out.add_row("cache / KV, Qwen3-30B-A3B, block 16", f"{result['cache_over_kv']:.3%}", "", "0.4%")
    out.add_row(
        f"cache / KV, testbed, block {plan.block_size}", f"{result['cache_over_kv_testbed']:.3%}", "", ""
    )
    out.add_row("signature on the wire", f"{result['signature_bytes']:.0f} bytes", "", "")
    for stage, ms in result["breakdown_ms"].items():
        out.add_row(f"stage {stage}", f"{ms:.3f} ms", "", "")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60, help="pairs of each kind, at least 20 (default 60)")
    parser.add_argument("--quick", action="store_true", help="5 pairs of each kind: does it run? No figures")
    parser.add_argument("--steps", type=int, default=4, help="decode steps of one pair (default 4)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens of a KV block (default 32)")
    parser.add_argument("--decode-counts", action="store_true", help="with per-request decode counts, opt-in")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and turns (default 0)")
    parser.add_argument("--model", type=Path, help="where the inflated model is or goes (default: temporary)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    pairs = 5 if given.quick else given.pairs
    if pairs < 20 and not given.quick:
        parser.error(f"--pairs must be at least 20, got {pairs}")
    if not 1 <= given.steps <= 64:
        parser.error(f"--steps must be 1 to 64, got {given.steps}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan(
            model=inflated_testbed((given.model or Path(scratch) / f"testbed-{WIDTH}").absolute()),
            pairs=pairs,
            steps=given.steps,
            batch=16,
            tokens=64,
            block_size=given.block_size,
            decode_counts=given.decode_counts,
            seed=given.seed,
        )
        result = measured(plan)
    Console().print(table(result, plan))
    if given.json:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        settings = {**asdict(plan), "model": f"testbed, width {WIDTH}, bfloat16"}
        given.json.write_text(json.dumps({**result, "settings": settings, **machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
