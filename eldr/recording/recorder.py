"""Records prefill and decode counts of many prompts, with a bounded number in flight."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from eldr.calibration.counts import Counts
from eldr.recording.prompts_file import Prompt
from eldr.recording.request_counts import RequestCounts, RequestCountsError, counts_of
from eldr.recording.two_legs import LegError, decode_counts, prefill


class RecordError(Exception):
    """The run cannot go on; the message names the prompt and what is wrong."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Base URLs of the workers' OpenAI servers, and the MoE layer indices where they are known."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    model: str
    moe_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if not getattr(self, name):
                raise ValueError(f"{name} must name at least one worker")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """How prompts are run. `seed` + position of the prompt seeds its sampling. Raises ValueError.

    `prompt_tokens` cuts prompts to their last tokens, None leaves them whole. With one output token there is no
    decode leg, and nothing is known of decode (case 1.14).
    """

    output_tokens: int = 64
    temperature: float = 0.8
    seed: int = 0
    in_flight: int = 32
    timeout_s: float = 600.0
    ignore_eos: bool = True
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("output_tokens", 1), ("temperature", 0.0), ("seed", 0), ("in_flight", 1)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


async def record(
    prompts: Sequence[Prompt],
    targets: Targets,
    settings: RecordSettings,
    done: Callable[[int], None] = lambda _count: None,
    finished: Mapping[str, RequestCounts] | None = None,
    keep: Callable[[RequestCounts], None] = lambda _row: None,
) -> Counts:
    """Runs every prompt through a prefill and a decode worker and returns the counts of both.

    Workers are taken in turn. Prompts whose id is among `finished` are not run again; `keep` gets every other one's
    counts as soon as they are there. `done` is told how many prompts are finished. Raises RecordError at the first
    failure, once the other requests in flight are cancelled.
    """
    rows = dict(finished or {})
    waiting = iter([(position, prompt) for position, prompt in enumerate(prompts) if prompt.id not in rows])
    if rows:
        done(len(rows))

    async def work(session: aiohttp.ClientSession) -> None:
        for position, prompt in waiting:
            row = await _record_one(session, position, prompt, targets, settings)
            try:
                keep(row)
            except RequestCountsError as error:
                raise RecordError(f"prompt {prompt.id!r}: {error}") from error
            rows[prompt.id] = row
            done(len(rows))

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(settings.in_flight, len(prompts) - len(rows))):
                    group.create_task(work(session))
        except* RecordError as errors:
            raise errors.exceptions[0] from None
    return in_order(prompts, rows, targets.moe_layers)


async def _record_one(
    session: aiohttp.ClientSession,
    position: int,
    prompt: Prompt,
    targets: Targets,
    settings: RecordSettings,
) -> RequestCounts:
    body: dict[str, Any] = {
        "model": targets.model,
        "prompt": prompt.text,
        "max_tokens": settings.output_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + position,
        "ignore_eos": settings.ignore_eos,
    }
    if settings.prompt_tokens is not None:
        body["truncate_prompt_tokens"] = settings.prompt_tokens
    decodes = settings.output_tokens > 1
    try:
        first = await prefill(session, targets.prefill[position % len(targets.prefill)], body, decodes)
        decode = None
        if decodes:
            decode_url = targets.decode[position % len(targets.decode)]
            decode = await decode_counts(session, decode_url, body, first.handoff)
        layers = first.signature.shape[0]
        if targets.moe_layers is not None and len(targets.moe_layers) != layers:
            raise RequestCountsError(
                f"the signature has {layers} layers, the workers say {len(targets.moe_layers)}"
            )
        return RequestCounts(prompt.id, first.signature, decode, prompt.domain)
    except (LegError, RequestCountsError) as error:
        raise RecordError(f"prompt {prompt.id!r}: {error}") from error


def in_order(
    prompts: Iterable[Prompt], rows: Mapping[str, RequestCounts], moe_layers: tuple[int, ...] | None
) -> Counts:
    """The counts of all prompts, in their order. Raises RecordError where they are of different models."""
    try:
        return counts_of([rows[prompt.id] for prompt in prompts], moe_layers)
    except RequestCountsError as error:
        raise RecordError(str(error)) from error
