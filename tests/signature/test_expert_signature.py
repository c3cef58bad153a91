import numpy as np
import pytest

from eldr.signature.expert_signature import ExpertSignature, SignatureError
from eldr.signature.geometry import ModelGeometry

COUNTS = np.array([[2, 1, 1, 0], [0, 0, 2, 2]])


def signature(counts=COUNTS, tokens=2, covered=2, top_k=2, fingerprint="f") -> ExpertSignature:
    return ExpertSignature(fingerprint, top_k, tokens, covered, np.asarray(counts))


def test_counts_are_kept_as_read_only_integers():
    kept = signature().counts
    assert kept.dtype == np.uint32
    with pytest.raises(ValueError, match="read-only"):
        kept[0, 0] = 5


def test_counts_of_another_stride_equal_those_of_a_contiguous_copy():
    """Case 1.22: a view whose stride is larger than its width."""
    wide = np.full((2, 9), 7)
    wide[:, :4] = COUNTS
    assert (signature(wide[:, :4]).counts == COUNTS).all()
    assert signature(np.asfortranarray(COUNTS)).counts.flags.c_contiguous


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS[0], r"must be \[layers, experts\]"),
        (np.zeros((0, 4), int), r"must be \[layers, experts\]"),
        (np.array([[np.nan, 1.0]]), "counts must be finite"),
        (np.array([[np.inf, 1.0]]), "counts must be finite"),
        (np.array([[1.0, 3.0]]), "counts must be integers"),
        (np.array([[-1, 5]]), "must not be negative, got -1"),
        (np.array([[2**32, 0]]), "must fit 32 bits"),
        (np.array([[2, 2], [2, 1]]), r"layer 1 sums to 3, expected covered_tokens \* top_k = 2 \* 2 = 4"),
        (np.zeros((2, 4), int), "layer 0 sums to 0"),
    ],
)
def test_counts_that_no_prompt_can_have_are_refused(counts, message):
    with pytest.raises(SignatureError, match=message):
        signature(counts)


@pytest.mark.parametrize("covered", [-1, 3])
def test_covered_tokens_lie_within_the_prompt(covered):
    with pytest.raises(SignatureError, match=f"covered_tokens must be 0 to 2, got {covered}"):
        signature(covered=covered)


def test_tokens_without_known_picks_are_said_and_not_filled():
    assert signature(tokens=8, covered=2).coverage == 0.25
    empty = signature(np.zeros((2, 4), int), tokens=0, covered=0)
    assert empty.coverage == 0.0
    assert (empty.shares() == 0.0).all()


def test_a_share_is_at_most_one():
    shares = signature(np.array([[3, 1]]), tokens=2, covered=2).shares()
    assert shares.dtype == np.float32
    assert shares.tolist() == [[1.0, 0.5]]


def test_a_signature_of_another_model_is_told_with_both_values():
    model = ModelGeometry((0, 1), 4, 2, "f")
    signature().require_geometry(model)
    with pytest.raises(SignatureError, match="fingerprint is g, expected f"):
        signature(fingerprint="g").require_geometry(model)
    with pytest.raises(SignatureError, match=r"counts are \(1, 4\), expected \(2, 4\)"):
        signature(COUNTS[:1]).require_geometry(model)
    with pytest.raises(SignatureError, match="top_k is 1, expected 2"):
        signature(tokens=4, covered=4, top_k=1).require_geometry(model)
