"""Records prefill and decode counts of many prompts, with a bounded number in flight."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from eldr.calibration.counts import Counts
from eldr.recording.prompts_file import Prompt
from eldr.recording.two_legs import LegError, decode_counts, prefill
from eldr.signature.expert_signature import ExpertSignature


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

    `prompt_tokens` cuts prompts to their last tokens, None leaves them whole.
    """

    output_tokens: int = 64
    temperature: float = 0.8
    seed: int = 0
    in_flight: int = 32
    timeout_s: float = 600.0
    ignore_eos: bool = True
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("output_tokens", 2), ("temperature", 0.0), ("seed", 0), ("in_flight", 1)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")


Row = tuple[ExpertSignature, ExpertSignature]


async def record(
    prompts: Sequence[Prompt],
    targets: Targets,
    settings: RecordSettings,
    done: Callable[[int], None] = lambda _count: None,
) -> Counts:
    """Runs every prompt through a prefill and a decode worker and returns the counts of both.

    Workers are taken in turn. `done` is told how many prompts are finished. Raises RecordError at the first
    failure, once the other requests in flight are cancelled; nothing partial is returned.
    """
    rows: list[Row | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))
    finished = 0

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal finished
        for position, prompt in waiting:
            rows[position] = await _record_one(session, position, prompt, targets, settings)
            finished += 1
            done(finished)

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(settings.in_flight, len(prompts))):
                    group.create_task(work(session))
        except* RecordError as errors:
            raise errors.exceptions[0] from None
    return _counts(prompts, [row for row in rows if row is not None], targets.moe_layers)


async def _record_one(
    session: aiohttp.ClientSession,
    position: int,
    prompt: Prompt,
    targets: Targets,
    settings: RecordSettings,
) -> Row:
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
    try:
        first = await prefill(session, targets.prefill[position % len(targets.prefill)], body)
        decode_url = targets.decode[position % len(targets.decode)]
        return first.signature, await decode_counts(session, decode_url, body, first.handoff)
    except LegError as error:
        raise RecordError(f"prompt {prompt.id!r}: {error}") from error


def _counts(prompts: Sequence[Prompt], rows: list[Row], moe_layers: tuple[int, ...] | None) -> Counts:
    first = rows[0][0]
    for prompt, row in zip(prompts, rows, strict=True):
        for signature in row:
            for name in ("fingerprint", "shape", "top_k"):
                mine, theirs = getattr(first, name), getattr(signature, name)
                if mine != theirs:
                    raise RecordError(f"prompt {prompt.id!r}: {name} is {theirs}, other workers have {mine}")
    return Counts(
        ids=tuple(prompt.id for prompt in prompts),
        fingerprint=first.fingerprint,
        top_k=first.top_k,
        moe_layers=moe_layers or tuple(range(first.shape[0])),
        prompt_len=np.array([before.tokens for before, _ in rows]),
        prefill_counts=np.stack([before.counts for before, _ in rows]),
        decode_counts=np.stack([after.counts for _, after in rows]),
        domains=tuple(prompt.domain for prompt in prompts),
    )
