"""Two legs are one request: every position has one owner, and what is not known is not made up."""

import numpy as np
import pytest
from fake_two_leg_worker import EXPERTS, LAYERS, TOP_K, signature
from fake_two_leg_worker import counts_of as fake_counts

from eldr.recording.request_counts import (
    GateSums,
    PartialCountsError,
    RequestCounts,
    RequestCountsError,
    counts_of,
)
from eldr.signature import ExpertSignature


def covering(tokens, covered):
    return ExpertSignature("f", TOP_K, tokens, covered, fake_counts(1, covered))


def test_prompt_rows_are_prefills_and_generated_rows_the_decoders():
    """Cases 1.15 and 1.16: 48 tokens in blocks of 16, of which the decoder has 32 in its own cache."""
    prompt, generated = signature(48, 48), signature(3, 9)
    counts = counts_of([RequestCounts("a", prompt, generated)])
    np.testing.assert_array_equal(counts.prefill_counts[0], prompt.counts)
    np.testing.assert_array_equal(counts.decode_counts[0], generated.counts)
    assert (counts.prompt_len.tolist(), counts.decode_tokens.tolist()) == ([48], [9])


@pytest.mark.parametrize("covered", [16, 40, 47])
def test_a_prompt_with_blocks_of_another_owner_is_no_whole_request(covered):
    """Case 1.16: whole blocks, the last partial block, and the last token alone may be missing."""
    with pytest.raises(PartialCountsError, match=f"prefill counts of 'a' cover {covered} of 48 tokens"):
        RequestCounts("a", covering(48, covered), signature(3, 9))


def test_a_decode_leg_that_missed_a_token_is_no_whole_request():
    with pytest.raises(PartialCountsError, match="decode counts of 'a' cover 8 of 9 tokens"):
        RequestCounts("a", signature(48, 48), covering(9, 8))


def test_a_request_that_decoded_nothing_says_so_and_keeps_its_prompt():
    """Case 1.14: counts of no token are nothing decoded, whoever says it."""
    nothing = ExpertSignature("f", TOP_K, 0, 0, np.zeros((LAYERS, EXPERTS), np.uint32))
    rows = [RequestCounts("a", signature(7, 7), nothing), RequestCounts("b", signature(5, 5), None)]
    assert rows[0].decode is None
    counts = counts_of(rows)
    assert counts.decode_tokens.tolist() == [0, 0]
    np.testing.assert_array_equal(counts.prefill_counts[0], signature(7, 7).counts)


def test_prompt_counts_of_no_token_are_refused():
    nothing = ExpertSignature("f", TOP_K, 0, 0, np.zeros((LAYERS, EXPERTS), np.uint32))
    with pytest.raises(RequestCountsError, match="prefill counts of 'a' are of no token"):
        RequestCounts("a", nothing, None)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (signature(9, 9, "g"), "fingerprint is g, expected f"),
        (ExpertSignature("f", 1, 2, 2, np.full((LAYERS, 2), 1)), r"shape is \(2, 2\), expected \(2, 8\)"),
        (ExpertSignature("f", 4, 2, 2, np.full((LAYERS, EXPERTS), 1)), "top_k is 4, expected 2"),
    ],
)
def test_legs_and_requests_of_two_models_are_refused_with_both_values(other, message):
    with pytest.raises(RequestCountsError, match=f"decode counts of 'a': {message}"):
        RequestCounts("a", signature(7, 7), other)
    with pytest.raises(RequestCountsError, match=f"prefill counts of 'b': {message}"):
        counts_of([RequestCounts("a", signature(7, 7), None), RequestCounts("b", other, None)])


def test_gate_sums_are_kept_where_every_request_has_them():
    gate = GateSums(np.ones((LAYERS, EXPERTS), np.float32), -np.ones((LAYERS, EXPERTS), np.float32))
    rows = [RequestCounts("a", signature(7, 7), None, gate=gate), RequestCounts("b", signature(5, 5), None)]
    assert counts_of(rows[:1]).gate_logit.tolist() == [gate.logit.tolist()]
    assert counts_of(rows).gate_logit is None


def test_no_request_is_an_error():
    with pytest.raises(RequestCountsError, match="there is no request"):
        counts_of([])
