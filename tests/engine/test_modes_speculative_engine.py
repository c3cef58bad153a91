"""Drafted tokens: block rows, decode counts and unions where n-gram speculation proposes, and much is rejected.

The worker runs in a process of its own: n-gram proposals load llvmlite, beside which vLLM 0.32.0 cannot start
another CPU engine in the same process.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from exactness import assert_exact, prefill, scheduler_side_of, signature_of

pytestmark = pytest.mark.engine

DRAFTS = 4
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


class Drafts:
    """Counts what was drafted and accepted."""

    def __init__(self, scheduler: Any) -> None:
        self.drafted = self.accepted = 0
        make_stats = scheduler.make_spec_decoding_stats

        def counting(*args: Any, num_draft_tokens: int, num_accepted_tokens: int, **options: Any) -> Any:
            self.drafted += num_draft_tokens
            self.accepted += num_accepted_tokens
            return make_stats(
                *args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **options
            )

        scheduler.make_spec_decoding_stats = counting


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine(
        speculative_config=SPECULATION,
        distributed_executor_backend="mp",
        max_num_batched_tokens=128,
        extra={"kv_lease_duration": 1},
    )


@pytest.fixture(scope="module")
def repetitive(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts that repeat themselves, so that there is something to propose; none ends with its block."""
    return [(ids[:20] * 4)[:length] for ids, length in zip(prompts, (70, 75, 65, 40, 55, 79), strict=False)]


def test_drafts_that_fill_up_a_batch_behind_a_cached_prompt_are_not_counted(
    engine: Any, prompts: list[list[int]], reference: Any
) -> None:
    """Case 1.4. vLLM pads a request of which one token is left to run with drafts, in the prompt's last block."""
    lengths = (65, 97, 129, 33, 64, 200)
    wave = [(ids * 8)[:length] for ids, length in zip(prompts, lengths, strict=False)]
    side = scheduler_side_of(engine)
    plan, padded = side.plan, []

    def recording(scheduler_output: Any) -> Any:
        padded.extend(scheduler_output.scheduled_spec_decode_tokens.values())
        return plan(scheduler_output)

    assert_exact(prefill(engine, wave), wave, reference)
    side.plan = recording
    assert_exact(prefill(engine, wave), wave, reference)
    side.plan = plan
    assert padded.count([-1] * DRAFTS) >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rejected_drafts_are_in_no_decode_counts_and_in_no_later_signature(
    temperature: float, engine: Any, repetitive: list[list[int]], reference: Any
) -> None:
    """Case 1.4: a later prompt that finds generated tokens in the prefix cache counts them as uncovered."""
    from vllm import SamplingParams

    drafts = Drafts(engine.llm_engine.engine_core.engine_core.scheduler)
    sampling = SamplingParams(
        max_tokens=50,
        temperature=temperature,
        seed=3,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"eldr_decode_counts": True}},
    )
    answers = engine.generate([{"prompt_token_ids": ids} for ids in repetitive], sampling, use_tqdm=False)
    assert drafts.accepted < drafts.drafted
    assert drafts.accepted or temperature
    later = []
    for ids, answer in zip(repetitive, answers, strict=True):
        generated = list(answer.outputs[0].token_ids)
        counted = signature_of(answer, "eldr_decode_signature")
        assert counted.tokens == len(generated) - 1
        np.testing.assert_array_equal(
            counted.counts, reference.counts(ids + generated[:-1], len(ids))[1], "decode counts"
        )
        later.append(ids + generated + ids[:30])
    hits = 0
    for ids, prompt, answer in zip(repetitive, later, prefill(engine, later), strict=True):
        signature, hit = signature_of(answer), answer.num_cached_tokens
        picks = reference.picks(prompt)
        covered = np.concatenate([picks[: min(hit, len(ids))], picks[hit:]])
        assert (signature.tokens, signature.covered_tokens) == (len(prompt), len(covered))
        np.testing.assert_array_equal(signature.counts, reference._count(covered))
        hits += hit > len(ids)
    assert hits > len(repetitive) // 2
    side = scheduler_side_of(engine)
    assert not side._requests
    assert not side._in_flight
    assert not side._counts._tracked


def test_the_union_of_a_step_holds_its_drafts_and_nothing_else(
    engine: Any, repetitive: list[list[int]], reference: Any
) -> None:
    """A rejected draft's experts were read all the same. One request, so that each step's tokens are known."""
    from vllm import SamplingParams

    side = scheduler_side_of(engine)
    plan, reported = side.plan, side.reported
    ran: list[tuple[int, list[int]]] = []
    unions: list[Any] = []
    request: list[Any] = []

    def planning(scheduler_output: Any) -> Any:
        made = plan(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request[:] = [side._requests[request_id]]
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, [])
            if made.tokens == made.decode_tokens:
                ran.append((request[0].num_tokens - 1, drafts))
        return made

    def reporting(report: Any, sent: set[str], expired: frozenset[str]) -> None:
        if report is not None and report.union is not None:
            assert report.decode_tokens == 1 + len(ran[len(unions)][1])
            unions.append(report.union)
        reported(report, sent, expired)

    side.plan, side.reported = planning, reporting
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ids = repetitive[1][:-2]
    (answer,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    side.plan, side.reported = plan, reported
    text = ids + list(answer.outputs[0].token_ids)
    assert len(unions) == len(ran) > 4
    assert any(drafts for _, drafts in ran)
    for (position, drafts), union in zip(ran, unions, strict=True):
        picks = reference.picks(text[: position + 1] + drafts)[position:]
        expected = np.zeros_like(union)
        for token in picks:
            expected[np.arange(len(union))[:, None], token] = True
        np.testing.assert_array_equal(union, expected)
