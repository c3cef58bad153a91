"""Conversion of public traces for the policies benchmark."""

import numpy as np
import pytest

from integration.bench._traces import LEAST_DECODE, PREFILL_TOKENS, TASKS, prepared, public_counts


def trace(lengths, **more):
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((sum(lengths), 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    return {"expert_ids": ids, "offsets": np.cumsum([0, *lengths]).astype(np.int32), **more}


def test_first_tokens_stand_for_the_prompt_and_short_requests_are_left_out():
    lengths = [PREFILL_TOKENS + 20, PREFILL_TOKENS + LEAST_DECODE - 1, PREFILL_TOKENS + 30]
    one = trace(lengths)
    counts = public_counts({"model_law": one})
    assert counts.ids == ("model_law-0", "model_law-2")
    assert counts.domains == ("law", "law")
    assert counts.decode_len.tolist() == [20, 30]
    assert counts.prefill_counts.sum(axis=2).tolist() == [[2 * PREFILL_TOKENS] * 2] * 2
    np.testing.assert_array_equal(counts.decode_ids[0, :20], one["expert_ids"][PREFILL_TOKENS : lengths[0]])


def test_domains_come_from_the_metadata_where_there_is_one():
    meta = np.array('[{"domain": "math"}, {"domain": "law"}]')
    counts = public_counts({"model_x": trace([80, 80], meta=meta)})
    assert counts.domains == ("math", "law")


def test_only_short_requests_are_an_error():
    with pytest.raises(ValueError, match="no request has"):
        public_counts({"model_x": trace([20])})


def test_the_files_of_a_model_make_one_scenario(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    folder.mkdir()
    for name in ("law", "code"):
        np.savez(source / f"gptoss_{name}.npz", **trace([80, 90]))
    (scenario,) = prepared(source, folder)
    assert scenario.domains == ("code", "law")
    assert scenario.world.exact
    assert (folder / scenario.world.counts).is_file()


def test_the_testbeds_domains_make_tasks_languages_and_all(tmp_path):
    names = [*TASKS, "french", "german"]
    meta = np.array(str([{"domain": name} for name in names]).replace("'", '"'))
    np.savez(tmp_path / "traces.npz", **trace([80] * len(names), meta=meta))
    folder = tmp_path / "made"
    folder.mkdir()
    found = {s.name: set(s.domains) for s in prepared(tmp_path / "traces.npz", folder)}
    assert found == {
        "traces-tasks": set(TASKS),
        "traces-languages": {"french", "german"},
        "traces-all": set(names),
    }
