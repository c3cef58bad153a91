"""Expert counts of what single requests decoded."""

from typing import Any

import numpy as np

from eldr.engine.decode_counts import RESULT_KEY, DecodeCounts
from eldr.engine.step import Span
from eldr.rpc.codec import signature_from_text
from eldr.signature import ModelGeometry

GEOMETRY = ModelGeometry(moe_layers=(0, 1), experts=8, top_k=2, fingerprint="f")


def picks(*tokens: list[list[int]]) -> Any:
    """int32 [tokens, layers, top_k]."""
    return np.array(tokens, np.int32)


def test_only_generated_tokens_are_wanted_and_each_once() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    counts.start("a", 10)
    assert counts.wanted("a", 0, 10, [5, 6, 7], 4) is None
    assert counts.wanted("a", 9, 1, [7], 4) is None
    assert counts.wanted("a", 10, 1, [7], 4) == Span(10, 1, [7])
    # Preempted and resumed: everything is recomputed, only position 11 is news.
    assert counts.wanted("a", 0, 12, [1, 2, 3], 4) == Span(11, 1, [3])


def test_counts_of_a_finished_request_fill_its_answer() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    counts.start("a", 10)
    counts.add("a", picks([[0, 1], [2, 3]]))
    params = counts.finish("a")
    assert params == {RESULT_KEY: None}
    counts.add("a", picks([[0, 7], [2, 4]]))
    counts.step_ended()
    signature = signature_from_text(params[RESULT_KEY])
    assert signature.tokens == 2
    assert signature.counts[0].tolist() == [2, 1, 0, 0, 0, 0, 0, 1]
    assert signature.counts[1].tolist() == [0, 0, 2, 1, 1, 0, 0, 0]
    assert "a" not in counts


def test_a_token_with_a_missing_pick_is_left_out() -> None:
    counts = DecodeCounts(GEOMETRY, 4)
    counts.start("a", 1)
    counts.add("a", picks([[0, 1], [2, -1]], [[3, 4], [5, 6]]))
    params = counts.finish("a")
    counts.step_ended()
    assert params is not None
    assert signature_from_text(params[RESULT_KEY]).tokens == 1


def test_the_number_of_tracked_requests_is_bounded_and_refusals_are_counted() -> None:
    counts = DecodeCounts(GEOMETRY, 2)
    assert [counts.start(name, 1) for name in "abc"] == [True, True, False]
    assert counts.refused == 1
    counts.finish("a")
    counts.step_ended()
    assert counts.start("d", 1)


def test_a_request_that_generated_nothing_answers_without_counts() -> None:
    counts = DecodeCounts(GEOMETRY, 2)
    counts.start("a", 3)
    params = counts.finish("a")
    counts.step_ended()
    assert params == {RESULT_KEY: None}


def test_an_untracked_request_has_no_parameters() -> None:
    assert DecodeCounts(GEOMETRY, 2).finish("nobody") is None
