"""Which prompts are sent, in which order, and as what requests. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eldr.recording.prompts_file import Prompt

TEMPERATURE = 0.8
"""Sampled, since greedy decoding of a small model loops."""


class WorkloadError(ValueError):
    """A workload that the prompts cannot fill."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of the workload: its prompt and the seed of its sampling."""

    prompt: Prompt
    seed: int


def mixed_workload(prompts: Sequence[Prompt], count: int, seed: int) -> list[WorkItem]:
    """`count` prompts, domains in equal parts (one more for the first ones), in an order drawn by `seed`.

    The same arguments give the same workload. Raises WorkloadError where a domain has too few prompts.
    """
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    draw = random.Random(seed)
    chosen: list[Prompt] = []
    for position, (domain, members) in enumerate(sorted(by_domain.items())):
        share = count // len(by_domain) + (position < count % len(by_domain))
        if share > len(members):
            raise WorkloadError(f"{share} prompts of domain {domain!r} wanted, there are {len(members)}")
        chosen += draw.sample(members, share)
    draw.shuffle(chosen)
    return [WorkItem(prompt, seed * 1_000_003 + position) for position, prompt in enumerate(chosen)]


def rotated(policies: Sequence[str], round_number: int) -> list[str]:
    """The order of the policies in one round: each round begins with the next one."""
    start = round_number % len(policies)
    return [*policies[start:], *policies[:start]]


def fits_another_round(elapsed_s: float, done: int, limit_s: float) -> bool:
    """Whether one more round, as long as the mean of the `done` ones, ends within the limit."""
    return done == 0 or elapsed_s * (done + 1) / done <= limit_s


def completion_body(item: WorkItem, model: str, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """The request: the last `prompt_tokens` tokens of the prompt, exactly `output_tokens` tokens of output."""
    return {
        "model": model,
        "prompt": item.prompt.text,
        "truncate_prompt_tokens": prompt_tokens,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": TEMPERATURE,
        "seed": item.seed,
        "return_token_ids": True,
    }
