"""Prefill legs on an engine in this process, and the comparison of their signatures with a reference."""

from typing import Any

import numpy as np

from eldr.rpc.codec import signature_from_text
from eldr.signature import ExpertSignature

PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill(engine: Any, prompts: list[list[int]], salt: str | None = None, **settings: Any) -> list[Any]:
    """The prefill leg of every prompt, all at once; the answers in order. Another `salt` hits no older block."""
    from vllm import SamplingParams

    lora = settings.pop("lora_request", None)
    leg = {"max_tokens": 1, "temperature": 0.0, "extra_args": {"kv_transfer_params": dict(PREFILL_LEG)}}
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if salt is not None:
        requests = [{**request, "cache_salt": salt} for request in requests]
    sampling = SamplingParams(**{**leg, **settings})
    return list(engine.generate(requests, sampling, use_tqdm=False, lora_request=lora))


def signature_of(answer: Any, key: str = "eldr_signature") -> ExpertSignature:
    """The signature in an answer's transfer parameters."""
    return signature_from_text(answer.kv_transfer_params[key])


def assert_exact(answers: list[Any], prompts: list[list[int]], reference: Any) -> None:
    """Every signature covers its whole prompt and equals the reference count for count."""
    assert len(answers) == len(prompts)
    for answer, ids in zip(answers, prompts, strict=True):
        signature = signature_of(answer)
        np.testing.assert_array_equal(signature.counts, reference.counts(ids)[0])
        assert signature.tokens == signature.covered_tokens == len(ids)


def assert_exact_cold_and_hit(engine: Any, prompts: list[list[int]], reference: Any) -> None:
    """The prompts twice: the second time from the prefix cache."""
    assert_exact(prefill(engine, prompts), prompts, reference)
    again = prefill(engine, prompts)
    assert_exact(again, prompts, reference)
    assert sum(answer.num_cached_tokens for answer in again) > 0


def scheduler_side_of(engine: Any) -> Any:
    """eldr's scheduler side in an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler.connector._scheduler_side
