"""Outputs are compared token by token, signatures count for count."""

import numpy as np
import pytest

from eldr.demo.client import Completion
from eldr.demo.compare import ReferenceOutput, compare_outputs, compare_signatures

REFERENCE = {"r": ReferenceOutput((1, 2, 3, 4), (1.0, 1e-5, 1.1e-5, 0.5))}


def answer(*tokens, name="r", error=""):
    return Completion(name, "d", token_ids=tokens, error=error)


def test_equal_outputs_are_identical():
    check = compare_outputs([answer(1, 2, 3, 4), answer(1, 2, 3, 4)], REFERENCE)
    assert (check.checked, check.ties, check.different, check.identical) == (2, 0, (), True)


def test_a_difference_that_begins_at_a_tie_passes_and_is_counted():
    check = compare_outputs([answer(1, 9, 8, 7)], REFERENCE)
    assert (check.ties, check.identical) == (1, True)


@pytest.mark.parametrize("tokens", [(9, 2, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (1, 2, 3), (1, 9, 3), ()])
def test_any_other_difference_fails(tokens):
    check = compare_outputs([answer(*tokens), answer(1, 2, 3, 4)], REFERENCE)
    assert (check.checked, check.different, check.identical) == (2, ("r",), False)


def test_an_output_without_a_reference_fails():
    assert compare_outputs([answer(1, name="s")], REFERENCE).different == ("s",)


def test_failed_requests_are_not_checked_and_nothing_checked_is_not_identical():
    check = compare_outputs([answer(error="HTTP 503")], REFERENCE)
    assert (check.checked, check.identical) == (0, False)


def counts(*values):
    return np.array([values], dtype=np.uint32)


def test_signatures_are_compared_as_a_multiset_whatever_their_order():
    expected = [counts(1, 3), counts(2, 2), counts(1, 3)]
    check = compare_signatures(expected, [counts(2, 2), counts(1, 3)])
    assert (check.checked, check.wrong, check.exact) == (2, 0, True)


def test_one_count_that_is_off_is_wrong():
    check = compare_signatures([counts(1, 3)], [counts(2, 2)])
    assert (check.checked, check.wrong, check.exact) == (0, 1, False)


def test_a_signature_seen_more_often_than_sent_is_wrong():
    assert compare_signatures([counts(1, 3)], [counts(1, 3), counts(1, 3)]).wrong == 1


def test_the_same_bytes_in_another_shape_are_another_signature():
    flat = np.array([[1, 1, 2, 2]], dtype=np.uint32)
    assert compare_signatures([flat], [flat.reshape(2, 2)]).wrong == 1


def test_another_integer_type_is_the_same_signature():
    assert compare_signatures([counts(1, 3)], [counts(1, 3).astype(np.int64)]).exact


def test_nothing_seen_is_not_exact():
    assert not compare_signatures([counts(1, 3)], []).exact
