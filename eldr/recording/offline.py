"""Records the counts of many prompts with one engine in this process; only `eldr.engine` knows vLLM."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eldr.calibration.counts import Counts
from eldr.recording.prompts_file import Prompt
from eldr.recording.recorder import RecordError, RecordSettings, in_order
from eldr.recording.request_counts import GateSums, RequestCounts, RequestCountsError

Sums = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class Engine(Protocol):
    """The part of `eldr.engine.offline.OfflineEngine` that is used here."""

    moe_layers: tuple[int, ...]

    @property
    def max_model_len(self) -> int: ...

    def encode(self, text: str, last: int | None = None) -> list[int]: ...

    def request(self, request_id: str, token_ids: list[int], **sampling: Any) -> Any: ...

    def run(self, requests: Iterable[Any]) -> Iterator[Any]: ...

    def gate_sums(self, token_ids: list[int]) -> Sums: ...

    def close(self) -> None: ...


def offline_engine(model: str, *, in_flight: int, gate: bool, arguments: Mapping[str, Any]) -> Engine:
    """Starts vLLM here. Raises RecordError where it is not installed or cannot start."""
    try:
        from eldr.engine.offline import OfflineEngine, OfflineError
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eldr"):
            raise
        raise RecordError(
            f"--offline needs vLLM 0.32.0 in this Python, and {error.name!r} is missing: run eldr with the Python "
            "that serves your models"
        ) from error
    try:
        engine: Engine = OfflineEngine(model, in_flight=in_flight, gate=gate, arguments=arguments)
    except OfflineError as error:
        raise RecordError(str(error)) from error
    return engine


def record_offline(
    prompts: Sequence[Prompt],
    engine: Engine,
    settings: RecordSettings,
    *,
    gate: bool = False,
    done: Callable[[int], None] = lambda _count: None,
    finished: Mapping[str, RequestCounts] | None = None,
    keep: Callable[[RequestCounts], None] = lambda _row: None,
) -> Counts:
    """Like `record`, with one engine that serves both legs. Its gate sums are taken prompt by prompt, where asked for.

    Raises RecordError at the first prompt that cannot be run or counted.
    """
    rows = dict(finished or {})
    todo = [(position, prompt) for position, prompt in enumerate(prompts) if prompt.id not in rows]
    if rows:
        done(len(rows))
    group = settings.in_flight if gate else max(1, len(todo))
    for start in range(0, len(todo), group):
        part = {
            position: _tokens(prompt, engine, settings) for position, prompt in todo[start : start + group]
        }
        try:
            # The gate's prompts run alone, so they come before the group that runs together.
            sums = (
                {position: GateSums(*engine.gate_sums(ids)) for position, ids in part.items()} if gate else {}
            )
            for counted in engine.run(_requests(part, engine, settings)):
                prompt = prompts[int(counted.id)]
                row = RequestCounts(
                    prompt.id, counted.prefill, counted.decode, prompt.domain, sums.get(int(counted.id))
                )
                keep(row)
                rows[prompt.id] = row
                done(len(rows))
        except (RequestCountsError, RuntimeError) as error:
            # RuntimeError: what the engine says of a request that it could not count.
            raise RecordError(str(error)) from error
    return in_order(prompts, rows, engine.moe_layers)


def _tokens(prompt: Prompt, engine: Engine, settings: RecordSettings) -> list[int]:
    ids = engine.encode(prompt.text, settings.prompt_tokens)
    room = engine.max_model_len - settings.output_tokens
    if not 1 <= len(ids) <= room:
        raise RecordError(
            f"prompt {prompt.id!r} has {len(ids)} tokens, the model takes 1 to {room} beside {settings.output_tokens} "
            "output tokens; cut prompts with --prompt-tokens"
        )
    return ids


def _requests(part: Mapping[int, list[int]], engine: Engine, settings: RecordSettings) -> Iterator[Any]:
    for position, ids in part.items():
        yield engine.request(
            str(position),
            ids,
            max_tokens=settings.output_tokens,
            temperature=settings.temperature,
            seed=settings.seed + position,
            ignore_eos=settings.ignore_eos,
        )
