import numpy as np
import pytest

from eldr.calibration.counts import CountsError, merged, tally


def with_cell(array, index, value):
    changed = np.array(array, dtype=np.asarray(value).dtype if isinstance(value, float) else np.int64)
    changed[index] = value
    return changed


def test_counts_are_read_only_and_as_narrow_as_they_can_be(make_counts):
    counts = make_counts()
    assert counts.prefill_counts.dtype == np.uint8
    assert (counts.requests, counts.layers, counts.experts) == (40, 3, 12)
    assert (counts.decode_tokens == 30).all()
    for array in (counts.prefill_counts, counts.decode_counts, counts.prompt_len):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_whole_numbers_in_floats_are_taken(make_counts):
    counts = make_counts()
    again = make_counts(prefill_counts=counts.prefill_counts.astype(np.float64))
    assert (again.prefill_counts == counts.prefill_counts).all()


def test_equal_ids_are_refused_with_both_rows(make_counts):
    ids = tuple("same" if row in (3, 8) else str(row) for row in range(40))
    with pytest.raises(CountsError, match="row 8: id 'same' is already that of row 3"):
        make_counts(ids=ids)


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "are negative"), (np.nan, "are not finite"), (np.inf, "are not finite"), (0.5, "are not whole")],
)
@pytest.mark.parametrize("name", ["prefill_counts", "decode_counts"])
def test_impossible_values_are_refused_with_row_and_id(make_counts, name, value, message):
    """Case 5.5."""
    array = with_cell(getattr(make_counts(), name), (17, 1, 2), value)
    with pytest.raises(CountsError, match=rf"row 17 \(id 'r17'\): {name} {message}.* \(1 such rows\)"):
        make_counts(**{name: array})


def test_a_layer_whose_picks_do_not_sum_to_tokens_times_top_k_is_refused(make_counts):
    counts = make_counts()
    length = counts.prompt_len[5]
    array = with_cell(counts.prefill_counts, (5, 2, 0), int(counts.prefill_counts[5, 2, 0]) + 1)
    with pytest.raises(CountsError) as caught:
        make_counts(prefill_counts=array)
    assert str(caught.value) == (
        f"row 5 (id 'r5'): prefill_counts of layer 2 sum to {2 * length + 1}, "
        f"expected prompt_len * top_k = {length} * 2 (1 such rows)"
    )


def test_a_layer_that_was_never_captured_is_refused(make_counts):
    """Case 1.6: a router whose hook was bypassed leaves zeros of the right shape."""
    array = np.array(make_counts().prefill_counts)
    array[:, 1] = 0
    with pytest.raises(CountsError, match=r"row 0 .* of layer 1 sum to 0.*\(40 such rows\)"):
        make_counts(prefill_counts=array)


def test_decode_layers_that_disagree_are_refused(make_counts):
    array = with_cell(make_counts().decode_counts, (2, 0, 0), 60)
    with pytest.raises(
        CountsError,
        match=r"row 2 .*decode_counts of layer \d sum to \d+, those of layer 0 to \d+; all must be one multiple",
    ):
        make_counts(decode_counts=array)


def test_a_request_that_generated_nothing_is_kept_with_zeros(make_counts):
    """Case 1.14: max_tokens = 1 has no decode leg."""
    array = np.array(make_counts().decode_counts)
    array[4] = 0
    assert make_counts(decode_counts=array).decode_tokens[4] == 0


def test_decode_counts_that_lost_a_layer_are_refused_with_row_and_layer(make_counts):
    array = np.array(make_counts().decode_counts)
    array[5, 2] = 0
    with pytest.raises(CountsError, match=r"row 5 \(id 'r5'\): decode_counts of layer 2 sum to 0, .* to 60"):
        make_counts(decode_counts=array)


def test_gate_sums_are_kept_as_read_only_float32(make_counts):
    sums = np.random.default_rng(0).random((40, 3, 12))
    counts = make_counts(gate_probability=sums, gate_logit=-sums)
    assert counts.gate_probability.dtype == counts.gate_logit.dtype == np.float32
    assert np.array_equal(counts.gate_logit, -sums.astype(np.float32))
    with pytest.raises(ValueError, match="read-only"):
        counts.gate_logit[0] = 1
    assert make_counts().gate_probability is None


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("gate_probability", -0.1, r"row 7 \(id 'r7'\): gate_probability are negative"),
        ("gate_probability", np.nan, r"row 7 \(id 'r7'\): gate_probability are not finite"),
        ("gate_logit", -np.inf, r"row 7 \(id 'r7'\): gate_logit are not finite"),
    ],
)
def test_impossible_gate_sums_are_refused_with_row_and_id(make_counts, name, cell, message):
    with pytest.raises(CountsError, match=message):
        make_counts(**{name: with_cell(np.zeros((40, 3, 12)), (7, 1, 1), cell)})


@pytest.mark.parametrize("wrong", [np.zeros((40, 3, 11)), np.zeros((40, 3, 12), int)])
def test_gate_sums_of_another_shape_or_kind_are_refused(make_counts, wrong):
    with pytest.raises(CountsError, match=r"gate_logit must be floats of shape \(40, 3, 12\)"):
        make_counts(gate_logit=wrong)


def test_merged_counts_hold_the_requests_of_all_parts_in_order(make_counts):
    sums = np.ones((40, 3, 12), np.float32)
    first = make_counts(gate_logit=sums)
    second = make_counts(seed=1, ids=tuple(f"s{row}" for row in range(40)), gate_logit=2 * sums)
    both = merged([first, second])
    assert both.ids == first.ids + second.ids
    assert both.domains == first.domains + second.domains
    for name in ("prompt_len", "prefill_counts", "decode_counts", "gate_logit"):
        assert np.array_equal(
            getattr(both, name), np.concatenate([getattr(part, name) for part in (first, second)])
        )
    without = make_counts(seed=1, ids=second.ids)
    assert merged([first, without]).gate_logit is None, "sums that one part lacks are of no use"
    assert merged([first]) is first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "model-b"}, "part 2 has fingerprint 'model-b', part 1 has 'model-a'"),
        ({"moe_layers": (0, 1, 3)}, "part 2 has moe_layers"),
        ({"ids": tuple(f"r{row}" for row in range(40))}, "row 40: id 'r0' is already that of row 0"),
    ],
)
def test_parts_of_other_models_or_with_equal_ids_do_not_merge(make_counts, changes, message):
    ids = tuple(f"s{row}" for row in range(40))
    with pytest.raises(CountsError, match=message):
        merged([make_counts(), make_counts(**({"ids": ids} | changes))])


def test_nothing_merges_to_an_error():
    with pytest.raises(CountsError, match="no counts to merge"):
        merged([])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k must be 1 to 12, got 0"),
        ({"top_k": 13}, "top_k must be 1 to 12, got 13"),
        ({"moe_layers": (0, 1)}, "moe_layers must be 3 ascending indices"),
        ({"moe_layers": (0, 2, 1)}, "moe_layers must be 3 ascending indices"),
        ({"ids": ("a",)}, "ids must be 40, got 1"),
        ({"domains": ("a",)}, "domains must be 40, got 1"),
        ({"prompt_len": np.zeros(40, int)}, "prompt_len is below 1"),
        ({"prompt_len": np.ones(3, int)}, r"prompt_len must have shape \(40,\)"),
        ({"prefill_counts": np.zeros((40, 3))}, r"must be \[requests, layers, experts\]"),
        ({"decode_counts": np.zeros((40, 3, 5))}, r"decode_counts must have shape \(40, 3, 12\)"),
        ({"decode_counts": np.full((40, 3, 12), "x")}, "decode_counts must be numbers"),
        ({"decode_counts": np.full((40, 3, 12), 2**33)}, "must fit 32 bits"),
        ({"decode_ids": np.zeros((40, 1, 3, 2), int)}, "must be given together"),
    ],
)
def test_fields_that_do_not_fit_are_refused(make_counts, changes, message):
    with pytest.raises(CountsError, match=message):
        make_counts(**changes)


def test_unlabelled_requests_have_empty_domains(make_counts):
    assert make_counts(domains=()).domains == ("",) * 40


def test_a_tally_counts_the_real_steps_only():
    ids = np.array([[[[0, 1]], [[1, 2]], [[255, 255]]], [[[2, 0]], [[255, 255]], [[255, 255]]]])
    counts = tally(ids.astype(np.uint8), np.array([2, 1]), experts=3)
    assert counts.tolist() == [[[1, 2, 1]], [[1, 0, 1]]]


def test_a_tally_of_many_rows_equals_a_plain_count():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 5, size=(150, 4, 2, 3))
    counts = tally(ids, np.full(150, 4), experts=5)
    for row, layer in [(0, 0), (63, 1), (64, 0), (149, 1)]:
        assert counts[row, layer].tolist() == np.bincount(ids[row, :, layer].ravel(), minlength=5).tolist()


def test_a_pick_outside_the_experts_is_refused_with_its_row():
    ids = np.zeros((70, 2, 1, 1), dtype=np.uint8)
    ids[66, 1] = 255
    with pytest.raises(CountsError, match="row 66: decode_ids are not all 0 to 3"):
        tally(ids, np.full(70, 2), experts=4)


def test_a_length_beyond_the_steps_is_refused_with_its_row():
    with pytest.raises(CountsError, match="row 1: decode_len must be 0 to 2, got 3"):
        tally(np.zeros((2, 2, 1, 1), dtype=np.uint8), np.array([2, 3]), experts=4)
