"""The two references: one ordinary vLLM server for the outputs, Hugging Face for the signatures."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from eldr.cluster import Command
from eldr.demo.client import COMPLETIONS, Request
from eldr.demo.compare import CountArray, ReferenceOutput


class ReferenceRunError(Exception):
    """A reference could not be made; without it nothing can be compared."""


async def reference_outputs(
    url: str,
    requests: Sequence[Request],
    in_flight: int,
    timeout_s: float,
    done: Callable[[], None] = lambda: None,
) -> dict[str, ReferenceOutput]:
    """What the ordinary server at `url` answers to every request, by request id. Raises ReferenceRunError."""
    answers: dict[str, ReferenceOutput] = {}
    waiting = iter(requests)

    async def work(session: aiohttp.ClientSession) -> None:
        for request in waiting:
            body = {**request.body, "logprobs": 2, "return_tokens_as_token_ids": True}
            async with session.post(url + COMPLETIONS, json=body) as response:
                reply = await response.json(content_type=None)
            if response.status != 200:
                raise ReferenceRunError(f"{request.request_id}: HTTP {response.status}: {str(reply)[:300]}")
            answers[request.request_id] = read_output(reply)
            done()

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(min(in_flight, len(requests))):
                group.create_task(work(session))
    except* (aiohttp.ClientError, OSError, TimeoutError, ValueError, ReferenceRunError) as errors:
        first = errors.exceptions[0]
        raise ReferenceRunError(f"the ordinary server failed: {first or type(first).__name__}") from first
    return answers


def read_output(reply: Mapping[str, Any]) -> ReferenceOutput:
    """Tokens and gaps of a completion with the two best log-probabilities. Raises ReferenceRunError."""
    try:
        choice = reply["choices"][0]
        gaps = []
        for best in choice["logprobs"]["top_logprobs"]:
            first, second = sorted(best.values(), reverse=True)[:2]
            gaps.append(first - second)
        output = ReferenceOutput(tuple(choice["token_ids"]), tuple(gaps))
    except (LookupError, TypeError, ValueError) as error:
        raise ReferenceRunError(
            f"a reply without tokens and log-probabilities: {str(reply)[:300]}"
        ) from error
    if len(output.gaps) != len(output.token_ids):
        raise ReferenceRunError(f"{len(output.gaps)} log-probabilities for {len(output.token_ids)} tokens")
    return output


def counts_job(script: Path, model: Path, prompts: Sequence[Sequence[int]], folder: Path) -> Command:
    """The job that counts expert picks of token ids with Hugging Face; writes its input into `folder`."""
    ids = folder / "reference-prompts.json"
    ids.write_text(json.dumps([list(prompt) for prompt in prompts]))
    words = (sys.executable, str(script), str(model), str(ids), str(counts_file(folder)))
    env = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return Command("reference-counts", words, env, is_job=True)


def counts_file(folder: Path) -> Path:
    """Where the job writes."""
    return folder / "reference-counts.npz"


def read_counts(folder: Path, prompts: int) -> list[CountArray]:
    """The job's counts [layers, experts], one a prompt. Raises ReferenceRunError."""
    try:
        with np.load(counts_file(folder), allow_pickle=False) as arrays:
            counts = arrays["counts"]
    except (OSError, ValueError, KeyError) as error:
        raise ReferenceRunError(f"the reference's counts cannot be read: {error}") from error
    if len(counts) != prompts:
        raise ReferenceRunError(f"the reference counted {len(counts)} prompts, {prompts} were asked for")
    return list(counts)
