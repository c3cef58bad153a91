"""From block sums to the answer's signature; the life of a held transfer."""

import itertools
from typing import Any

import numpy as np
import pytest

from eldr.engine.handoff import SIGNATURE_KEY, PrefillHandoff, remote_tokens, signature_of_counts
from eldr.rpc.codec import signature_from_text
from eldr.signature import ModelGeometry

GEOMETRY = ModelGeometry(moe_layers=(1, 2), experts=4, top_k=2, fingerprint="f")


def counts_of(tokens: int) -> Any:
    """int32 [2, 4]: every layer sums to tokens * 2."""
    return np.array([[tokens, tokens, 0, 0], [0, tokens, tokens, 0]], np.int32)


def handoff(recent: int = 8) -> PrefillHandoff:
    return PrefillHandoff(GEOMETRY, recent)


def test_the_signature_is_in_the_answer_before_the_answer_leaves() -> None:
    """Case 1.13: vLLM finishes the request first and reads the step's report after, in one call."""
    state, params = handoff(), {"remote_request_id": "a"}
    state.finished("a", True, params)
    state.completed("a", 20, counts_of(20))
    state.step_ended(set())
    signature = signature_from_text(params[SIGNATURE_KEY])
    np.testing.assert_array_equal(signature.counts, counts_of(20))
    assert signature.tokens == signature.covered_tokens == 20
    assert state.counters.signatures == 1


def test_a_prompt_that_completed_in_an_earlier_step_answers_with_its_signature() -> None:
    state, params = handoff(), dict[str, Any]()
    state.completed("a", 5, counts_of(5))
    state.step_ended(set())
    state.finished("a", False, params)
    assert signature_from_text(params[SIGNATURE_KEY]).tokens == 5


def test_an_all_zero_prompt_is_not_captured_and_never_expert_0_chosen_by_all() -> None:
    """Cases 1.3 and 1.6."""
    state, params = handoff(), dict[str, Any]()
    state.finished("a", True, params)
    state.completed("a", 20, np.zeros((2, 4), np.int32))
    assert params[SIGNATURE_KEY] is None
    assert state.counters.missing_signatures == 1
    assert state.signature("a") is None


def test_a_layer_that_bypassed_the_hook_leaves_no_signature() -> None:
    """Case 1.6: one layer of two was never captured."""
    counts = counts_of(20)
    counts[1] = 0
    assert signature_of_counts(counts, 20, GEOMETRY) is None


def test_half_a_prompt_is_a_signature_that_says_so() -> None:
    """Cases 1.12 and 1.17: two of three blocks are known."""
    signature = signature_of_counts(counts_of(32), 48, GEOMETRY)
    assert signature is not None
    assert (signature.tokens, signature.covered_tokens) == (48, 32)
    assert signature.coverage == pytest.approx(2 / 3)


def test_more_picks_than_tokens_is_no_signature() -> None:
    assert signature_of_counts(counts_of(49), 48, GEOMETRY) is None


def test_a_request_whose_report_never_came_answers_without_a_signature_and_is_counted() -> None:
    state, params = handoff(), dict[str, Any]()
    state.finished("a", True, params)
    state.step_ended(set())
    assert params[SIGNATURE_KEY] is None
    assert state.counters.missing_signatures == 1


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "abort", "sent"])))
def test_finish_abort_and_sent_notice_in_any_order_leave_nothing_held(order: tuple[str, ...]) -> None:
    """Case 2.3, on the hand-off's own state."""
    state = handoff()
    actions = {
        "finish": lambda: state.finished("a", True, {}),
        "abort": lambda: state.ask_release("a"),
        "sent": lambda: state.step_ended({"a"}),
    }
    for action in order:
        actions[action]()
        state.take_releases()
    state.step_ended({"a"})
    assert state.held == 0
    assert not state.ask_release("a")
    assert state.take_releases() == []


def test_a_release_asked_for_twice_is_done_once() -> None:
    state = handoff()
    state.finished("a", True, {})
    assert state.ask_release("a")
    assert state.ask_release("a")
    assert state.take_releases() == ["a"]
    assert state.take_releases() == []
    assert state.counters.releases == 1


def test_an_unknown_transfer_is_not_released() -> None:
    assert not handoff().ask_release("nobody")


def test_a_connector_that_cannot_free_a_transfer_early_says_so() -> None:
    state = PrefillHandoff(GEOMETRY, 8, can_release=False)
    state.finished("a", True, {})
    assert not state.ask_release("a")
    assert state.take_releases() == []
    assert state.held == 1


def test_recent_signatures_are_bounded() -> None:
    state = handoff(recent=3)
    for number in range(10):
        state.completed(str(number), 1, counts_of(1))
    assert [state.signature(str(number)) is not None for number in range(10)] == [False] * 7 + [True] * 3


def test_nothing_of_10000_requests_is_left() -> None:
    state = handoff(recent=4)
    for number in range(10_000):
        name = str(number)
        state.finished(name, True, {})
        if number % 3:
            state.completed(name, 2, counts_of(2))
        state.step_ended({name})
    assert state.held == len(state._awaiting) == len(state._asked) == 0
    assert len(state._recent) == 4


@pytest.mark.parametrize("held", ["cmpl-leg-1-0-8f3a2b1c", "chatcmpl-leg-1-8f3a2b1c"])
def test_a_transfer_whose_answer_was_never_seen_is_released_by_the_id_of_its_leg(held: str) -> None:
    state = handoff()
    state.finished(held, True, {})
    assert not state.ask_release("1")
    assert not state.ask_release("0")
    assert state.ask_release("leg-1")
    assert state.take_releases() == [held]


@pytest.mark.parametrize(
    ("found", "computed", "held", "taken"),
    [
        (8, 0, 8, 8),
        (9, 0, 8, 8),
        (5, 4, 8, 4),
        (1, 8, 8, 0),
        (3, 0, 8, 3),
        (9, 0, None, 9),
        (9, 0, 0, 9),
    ],
)
def test_a_decoder_takes_no_more_tokens_over_than_prefill_computed(
    found: int, computed: int, held: int | None, taken: int
) -> None:
    """Case 2.23: prefill of 8 tokens, a decode prompt of 9, none, some or all of the 8 cached."""
    assert remote_tokens(found, computed, {"do_remote_prefill": True, "remote_num_tokens": held}) == taken


def test_a_prefill_legs_own_count_is_left_alone() -> None:
    assert remote_tokens(9, 0, {"do_remote_decode": True, "remote_num_tokens": 8}) == 9
    assert remote_tokens(9, 0, {}) == 9
