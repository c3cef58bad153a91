"""An engine in this process that runs prompts as both legs at once and counts them."""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.platforms import current_platform

from eldr.engine.capture import target_moe_layers
from eldr.engine.decode_counts import RESULT_KEY, WANTED_KEY
from eldr.engine.gate_capture import GateArray, GateCapture, GateError
from eldr.engine.handoff import SIGNATURE_KEY
from eldr.rpc.codec import signature_from_text
from eldr.signature.expert_signature import ExpertSignature

CONNECTOR = {
    "kv_connector": "EldrOfflineConnector",
    "kv_connector_module_path": "eldr.engine.offline_connector",
    "kv_role": "kv_producer",
}


class OfflineError(RuntimeError):
    """The engine cannot start as asked, or did not count; the message names the request or the setting."""


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """One prompt. `id` is unique in a run."""

    id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True, eq=False)
class OfflineCounts:
    """Of one request. `decode` is None where no generated token was run."""

    id: str
    prefill: ExpertSignature
    decode: ExpertSignature | None


def _free_port() -> int:
    """Nobody asks this worker; its address must be one all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class OfflineEngine:
    """vLLM in this process with eldr's capture and no transfer of KV. `close` ends it.

    Counts come from the same code as in a served engine: a signature cache by block, so that chunked prefill, prefix
    hits and preemption change nothing, and decode counts by position. `arguments` go to vLLM's LLM; eager mode is the
    default. With `gate` prompts can also be run alone, for the sums of their gates.
    Raises OfflineError for arguments that eldr sets itself, and where vLLM cannot start.
    """

    def __init__(self, model: str, *, in_flight: int, gate: bool, arguments: Mapping[str, Any]) -> None:
        taken = {"model", "kv_transfer_config", "enable_return_routed_experts"} & arguments.keys()
        if taken:
            raise OfflineError(f"{', '.join(sorted(taken))}: set by eldr, leave it out")
        if gate and arguments.get("enforce_eager", True) is not True:
            raise OfflineError("gate sums need an eager engine: leave enforce_eager=true")
        self._in_flight = in_flight
        eldr = {
            "worker_id": "offline",
            "grpc_listen": f"127.0.0.1:{_free_port()}",
            "http_url": "http://127.0.0.1:1",
            "max_tracked_requests": in_flight,
            # A signature is kept from the end of its prompt to the end of its request.
            "recent_signatures": max(1024, 16 * in_flight),
        }
        defaults: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": in_flight}
        if current_platform.is_cpu():
            # A seeded prompt that is prefilled in chunks kills vLLM 0.32.0 on a CPU.
            defaults["enable_chunked_prefill"] = False
        try:
            with _in_this_process():
                self._llm = LLM(
                    model=model,
                    kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": {"eldr": eldr}},
                    **{**defaults, **arguments},
                )
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            raise OfflineError(f"vLLM cannot start {model!r}: {error}") from error
        self._engine = self._llm.llm_engine
        self._tokenizer: Any = self._llm.get_tokenizer()
        config = self._engine.vllm_config
        self.moe_layers: tuple[int, ...] = tuple(runners := target_moe_layers(config))
        self._gate: GateCapture | None = None
        if gate:
            try:
                self._gate = GateCapture(runners, config.model_config.get_num_experts())
            except GateError as error:
                self.close()
                raise OfflineError(f"--gate: {error}") from error
        self._salts = 0

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return int(self._engine.vllm_config.model_config.max_model_len)

    @property
    def scoring(self) -> str:
        """The gate's scoring function, empty without gate capture."""
        return "" if self._gate is None else self._gate.scoring

    def encode(self, text: str, last: int | None = None) -> list[int]:
        """Token ids of a text as the completions route makes them; at most the `last` ones."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids if last is None else ids[-last:]

    def request(self, request_id: str, token_ids: list[int], **sampling: Any) -> OfflineRequest:
        """A request for `run`; `sampling` are the other fields of OfflineRequest."""
        return OfflineRequest(request_id, token_ids, **sampling)

    def run(self, requests: Iterable[OfflineRequest]) -> Iterator[OfflineCounts]:
        """Counts of the requests as they end, at most `in_flight` at a time. Raises OfflineError."""
        waiting = iter(requests)
        running: dict[str, OfflineRequest] = {}
        try:
            while True:
                while len(running) < self._in_flight and (request := next(waiting, None)) is not None:
                    running[request.id] = request
                    self._add(request)
                if not running:
                    return
                for output in self._engine.step():
                    if output.finished:
                        yield _counted(running.pop(output.request_id), output)
        finally:
            if running:
                self._engine.abort_request(list(running))

    def gate_sums(self, token_ids: list[int]) -> tuple[GateArray, GateArray]:
        """Sums of scores and of logits over a prompt, float32 [layers, experts]. Nothing else may be running.

        Raises GateError where a layer did not see every token once.
        """
        assert self._gate is not None
        self._gate.begin()
        self._salts += 1
        # With a salt of its own the prompt meets no cached block, so every token runs.
        prompt = tokens_input(token_ids, cache_salt=f"eldr-gate-{self._salts}")
        self._engine.add_request(f"gate-{self._salts}", prompt, SamplingParams(max_tokens=1, temperature=0.0))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._gate.sums(len(token_ids))

    def close(self) -> None:
        """Ends the engine."""
        if self._gate is not None:
            self._gate.close()
        self._engine.engine_core.shutdown()

    def _add(self, request: OfflineRequest) -> None:
        wanted = {SIGNATURE_KEY: True, WANTED_KEY: True}
        sampling = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=request.ignore_eos,
            extra_args={"kv_transfer_params": wanted},
        )
        self._engine.add_request(request.id, tokens_input(request.token_ids), sampling)


def _counted(request: OfflineRequest, output: Any) -> OfflineCounts:
    params = output.kv_transfer_params or {}
    signature, decoded = params.get(SIGNATURE_KEY), params.get(RESULT_KEY)
    if signature is None:
        raise OfflineError(f"request {request.id!r} has no signature: some layer's routing was not captured")
    generated = len(output.outputs[0].token_ids)
    decode = None if decoded is None else signature_from_text(decoded)
    run = 0 if decode is None else decode.tokens
    if run != generated - 1:
        raise OfflineError(
            f"request {request.id!r}: {generated} tokens were generated, the counts say {run}, expected {generated - 1}"
        )
    return OfflineCounts(request.id, signature_from_text(signature), decode)


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Has vLLM run its engine core here."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
