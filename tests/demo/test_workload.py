"""The workload is mixed, repeatable and the same for every policy."""

from collections import Counter

import pytest

from eldr.demo.workload import (
    WorkItem,
    WorkloadError,
    completion_body,
    fits_another_round,
    mixed_workload,
    rotated,
)
from eldr.recording import Prompt

PROMPTS = [Prompt(f"{domain}{n}", f"text {domain} {n}", domain) for domain in "abc" for n in range(10)]


def test_domains_have_equal_parts_and_the_rest_goes_to_the_first():
    items = mixed_workload(PROMPTS, 11, 1)
    assert Counter(item.prompt.domain for item in items) == {"a": 4, "b": 4, "c": 3}
    assert len({item.prompt.id for item in items}) == 11


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert mixed_workload(PROMPTS, 12, 1) == mixed_workload(list(PROMPTS), 12, 1)
    assert mixed_workload(PROMPTS, 12, 1) != mixed_workload(PROMPTS, 12, 2)


def test_domains_are_shuffled_into_each_other():
    domains = [item.prompt.domain for item in mixed_workload(PROMPTS, 30, 1)]
    assert domains != sorted(domains)


def test_every_request_has_a_seed_of_its_own():
    items = mixed_workload(PROMPTS, 30, 3)
    assert len({item.seed for item in items}) == 30


def test_too_few_prompts_of_a_domain_are_named():
    with pytest.raises(WorkloadError, match="11 prompts of domain 'a' wanted, there are 10"):
        mixed_workload(PROMPTS, 31, 1)


def test_each_round_begins_with_the_next_policy():
    policies = ("x", "y", "z")
    assert [rotated(policies, n) for n in range(4)] == [
        ["x", "y", "z"],
        ["y", "z", "x"],
        ["z", "x", "y"],
        ["x", "y", "z"],
    ]


def test_the_first_round_always_fits_and_later_ones_by_the_mean_of_those_before():
    assert fits_another_round(0.0, 0, 1)
    assert fits_another_round(200.0, 2, 300)
    assert not fits_another_round(201.0, 2, 300)


def test_a_request_fixes_length_and_sampling():
    body = completion_body(WorkItem(PROMPTS[0], 7), "m", 97, 64)
    assert body == {
        "model": "m",
        "prompt": "text a 0",
        "truncate_prompt_tokens": 97,
        "max_tokens": 64,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 7,
        "return_token_ids": True,
    }
