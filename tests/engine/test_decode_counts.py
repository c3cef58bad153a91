"""Expert counts of what single requests decoded."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from eldr.engine.decode_counts import RESULT_KEY, DecodeCounts
from eldr.rpc.codec import signature_from_text
from eldr.signature import ModelGeometry

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")
NOT_RUN = [[-1, -1], [-1, -1]]


@dataclass
class Request:
    """What is read of vLLM's request."""

    num_prompt_tokens: int
    num_tokens: int


def one(expert: int) -> list[list[int]]:
    """Picks of one token in both layers."""
    return [[expert, 7], [expert, 6]]


def picks(*tokens: list[list[int]]) -> Any:
    """int32 [tokens, layers, top_k]."""
    return np.array(tokens, np.int32)


def counted(counts: DecodeCounts, name: str = "a") -> Any:
    """Tokens and counts of the first layer in the answer of a request that ends now."""
    params = counts.finish(name)
    counts.step_ended()
    assert params is not None
    signature = signature_from_text(params[RESULT_KEY])
    return signature.tokens, signature.counts[0].tolist()


def test_generated_tokens_are_wanted_once_and_prompt_tokens_never() -> None:
    """Case 1.16: a decoder that runs the last prompt token again, with its own or a pulled cache, counts none."""
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 10)
    counts.start("a", request)
    assert not counts.wanted("a", 9)
    assert not counts.wanted("a", 10)
    request.num_tokens = 11
    assert counts.wanted("a", 11) == range(10, 11)
    request.num_tokens = 12
    counts.add("a", range(10, 11), picks(one(0)))
    # Preempted and resumed: everything is recomputed, only position 11 is news.
    assert not counts.wanted("a", 11)
    assert counts.wanted("a", 12) == range(11, 12)


def test_counts_of_a_finished_request_fill_its_answer() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 12)
    counts.start("a", request)
    counts.add("a", range(10, 11), picks([[0, 1], [2, 3]]))
    params = counts.finish("a")
    assert params == {RESULT_KEY: None}
    request.num_tokens = 13
    counts.add("a", range(11, 12), picks([[0, 7], [2, 4]]))
    counts.step_ended()
    signature = signature_from_text(params[RESULT_KEY])
    assert signature.tokens == 2
    assert signature.counts[0].tolist() == [2, 1, 0, 0, 0, 0, 0, 1]
    assert signature.counts[1].tolist() == [0, 0, 2, 1, 1, 0, 0, 0]
    assert "a" not in counts


def test_rejected_drafts_are_not_counted_and_their_positions_come_again() -> None:
    """Case 1.4. Three drafts, of which one is accepted; then none of two."""
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 11)
    counts.start("a", request)
    assert counts.wanted("a", 14) == range(10, 14)
    request.num_tokens = 13
    counts.add("a", range(10, 14), picks(one(0), one(1), one(2), one(2)))
    assert counts.wanted("a", 15) == range(12, 15)
    request.num_tokens = 14
    counts.add("a", range(12, 15), picks(one(3), one(4), one(4)))
    assert counted(counts) == (3, [1, 1, 0, 1, 0, 0, 0, 3])


def test_tokens_behind_a_stop_among_accepted_drafts_are_not_counted() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 11)
    counts.start("a", request)
    # Sampled after the drafts at 10..13: of the accepted ones the request keeps two, the second ends it.
    request.num_tokens = 13
    counts.add("a", range(10, 14), picks(one(0), one(1), one(2), one(3)))
    assert counted(counts) == (2, [1, 1, 0, 0, 0, 0, 0, 2])


def test_overlapping_steps_count_every_position_once() -> None:
    """Under asynchronous scheduling a step is planned before the results of the one before are in."""
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 11)
    counts.start("a", request)
    first, second = counts.wanted("a", 11), counts.wanted("a", 12)
    assert (first, second) == (range(10, 11), range(10, 12))
    request.num_tokens = 12
    counts.add("a", first, picks(one(0)))
    third = counts.wanted("a", 13)
    assert third == range(11, 13)
    request.num_tokens = 13
    counts.add("a", second, picks(NOT_RUN, one(1)))
    request.num_tokens = 14
    counts.add("a", third, picks(NOT_RUN, one(2)))
    assert counted(counts) == (3, [1, 1, 1, 0, 0, 0, 0, 3])


def test_a_token_whose_result_was_thrown_away_is_counted_when_it_is_run_again() -> None:
    """Preempted while its step was under way: the step's token is not in the request."""
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(10, 11)
    counts.start("a", request)
    counts.add("a", counts.wanted("a", 11), picks(one(0)))
    again = counts.wanted("a", 11)
    assert again == range(10, 11)
    request.num_tokens = 12
    counts.add("a", again, picks(one(0)))
    assert counted(counts) == (1, [1, 0, 0, 0, 0, 0, 0, 1])


def test_a_token_with_a_missing_pick_is_left_out() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    counts.start("a", Request(1, 4))
    counts.add("a", range(1, 3), picks([[0, 1], [2, -1]], [[3, 4], [5, 6]]))
    assert counted(counts)[0] == 1


def test_the_number_of_tracked_requests_is_bounded_and_refusals_are_counted() -> None:
    counts = DecodeCounts(GEOMETRY, 2)
    assert [counts.start(name, Request(1, 1)) for name in "abc"] == [True, True, False]
    assert counts.refused == 1
    counts.finish("a")
    counts.step_ended()
    assert counts.start("d", Request(1, 1))


def test_a_request_that_generated_nothing_answers_without_counts() -> None:
    counts = DecodeCounts(GEOMETRY, 2)
    counts.start("a", Request(3, 3))
    params = counts.finish("a")
    counts.step_ended()
    assert params == {RESULT_KEY: None}


def test_kept_counts_leave_the_answer_alone_and_can_be_read_by_name() -> None:
    counts = DecodeCounts(GEOMETRY, 4, keep_limit=2)
    request = Request(10, 12)
    counts.start("a", request, keep_as="res-a")
    counts.add("a", range(10, 11), picks(one(0)))
    request.num_tokens = 13
    assert counts.finish("a") is None
    counts.add("a", range(11, 12), picks(one(1)))
    counts.step_ended()
    kept = counts.kept("res-a")
    assert kept is not None
    assert (kept.tokens, kept.counts[0].tolist()) == (2, [1, 1, 0, 0, 0, 0, 0, 2])
    assert "a" not in counts


def test_counts_of_a_request_that_was_stopped_between_steps_are_kept_at_once() -> None:
    """The front end finds a stop string and aborts; with nothing else to do no step follows."""
    counts = DecodeCounts(GEOMETRY, 4, keep_limit=2)
    counts.start("a", Request(10, 12), keep_as="res-a")
    counts.add("a", range(10, 11), picks(one(0)))
    counts.finish("a")
    kept = counts.kept("res-a")
    assert kept is not None
    assert kept.tokens == 1


def test_kept_counts_of_a_request_that_ended_with_its_first_token_are_of_no_token() -> None:
    """Case 1.14: known to be none, not unknown."""
    counts = DecodeCounts(GEOMETRY, 4, keep_limit=2)
    counts.start("a", Request(10, 11), keep_as="res-a")
    counts.finish("a")
    counts.step_ended()
    kept = counts.kept("res-a")
    assert kept is not None
    assert (kept.tokens, kept.covered_tokens) == (0, 0)


def test_the_oldest_kept_counts_go_first() -> None:
    counts = DecodeCounts(GEOMETRY, 4, keep_limit=2)
    for name in "abc":
        counts.start(name, Request(1, 2), keep_as=name)
        counts.finish(name)
        counts.step_ended()
    assert [counts.kept(name) is not None for name in "abc"] == [False, True, True]


def test_prompt_tokens_that_no_prefill_computed_are_counted_here() -> None:
    """Case 1.16: the prompt goes on with a first token from prefill; every position has one owner."""
    counts = DecodeCounts(GEOMETRY, 4)
    request = Request(11, 12)
    counts.start("a", request, computed=10)
    assert counts.wanted("a", 11) == range(10, 11)
    counts.add("a", range(10, 11), picks(one(0)))
    request.num_tokens = 13
    counts.add("a", counts.wanted("a", 12), picks(one(1)))
    assert counted(counts) == (2, [1, 1, 0, 0, 0, 0, 0, 2])


def test_prefill_never_owns_more_than_the_prompt() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    counts.start("a", Request(10, 10), computed=12)
    assert counts.wanted("a", 11) == range(10, 11)


@pytest.mark.parametrize("name", ["nobody", "gone"])
def test_an_untracked_request_has_no_parameters_and_takes_no_picks(name: str) -> None:
    counts = DecodeCounts(GEOMETRY, 2)
    counts.start("gone", Request(1, 2))
    counts.finish("gone")
    counts.step_ended()
    assert counts.finish(name) is None
    counts.add(name, range(1, 2), picks(one(0)))
    assert name not in counts
