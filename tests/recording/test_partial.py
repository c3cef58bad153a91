"""An interrupted calibration goes on from the requests that are whole in its partial file."""

import numpy as np
import pytest
from fake_two_leg_worker import EXPERTS, LAYERS, signature

from eldr.recording.partial import PartialError, PartialFile
from eldr.recording.request_counts import GateSums, RequestCounts, RequestCountsError

BINDING = {"prompts_sha256": "abc", "output_tokens": 64, "prompt_tokens": None}


def row(name, tokens=7, decode=5, **more):
    return RequestCounts(name, signature(tokens, tokens), decode and signature(tokens, decode), "law", **more)


@pytest.fixture
def path(tmp_path):
    """A file with three finished requests."""
    found = tmp_path / "counts.npz.partial"
    with PartialFile(found, BINDING) as partial:
        for name in "abc":
            partial.add(row(name))
    return found


def reopened(path, **changes):
    with PartialFile(path, BINDING | changes) as partial:
        return partial


def test_finished_requests_come_back_as_they_were(tmp_path):
    gate = GateSums(
        np.full((LAYERS, EXPERTS), 0.25, np.float32), np.full((LAYERS, EXPERTS), -1.5, np.float32)
    )
    with PartialFile(tmp_path / "p", BINDING) as partial:
        partial.add(row("a", gate=gate))
        partial.add(row("b", decode=None))
    rows = reopened(tmp_path / "p").rows
    assert list(rows) == ["a", "b"]
    assert rows["a"].domain == "law"
    np.testing.assert_array_equal(rows["a"].prefill.counts, signature(7, 7).counts)
    np.testing.assert_array_equal(rows["a"].decode.counts, signature(7, 5).counts)
    np.testing.assert_array_equal(rows["a"].gate.probability, gate.probability)
    np.testing.assert_array_equal(rows["a"].gate.logit, gate.logit)
    assert rows["b"].decode is None
    assert rows["b"].gate is None


def test_a_resumed_file_takes_more(path):
    with PartialFile(path, BINDING) as partial:
        partial.add(row("d"))
    assert list(reopened(path).rows) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_line_that_a_crash_has_torn_is_dropped_and_the_file_goes_on(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    with PartialFile(path, BINDING) as partial:
        assert (list(partial.rows), partial.damaged_lines) == (["a", "b"], 1)
        partial.add(row("c", tokens=9))
    again = reopened(path)
    assert (list(again.rows), again.damaged_lines) == (["a", "b", "c"], 0)
    assert again.rows["c"].prefill.tokens == 9


def test_from_a_damaged_line_on_requests_are_run_again(path):
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:50] + b"#" + lines[2][51:]
    path.write_bytes(b"\n".join(lines))
    again = reopened(path)
    assert (list(again.rows), again.damaged_lines) == (["a"], 2)


def test_a_first_line_that_a_crash_has_torn_begins_anew(path):
    path.write_bytes(path.read_bytes()[:30])
    assert reopened(path).rows == {}
    assert reopened(path).damaged_lines == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_tokens": 32}, "output_tokens 64, now 32"),
        ({"prompts_sha256": "abd"}, "prompts_sha256 'abc', now 'abd'"),
        ({"prompt_tokens": 9}, "prompt_tokens None, now 9"),
        ({"gate": True}, "gate None, now True"),
        ({"output_tokens": 1, "prompt_tokens": 2}, "output_tokens 64, now 1; prompt_tokens None, now 2"),
    ],
)
def test_changed_settings_are_refused_with_both_values_and_what_to_do(path, changes, message):
    before = path.read_bytes()
    with pytest.raises(PartialError, match=f"was begun with {message}.*--restart"):
        reopened(path, **changes)
    assert path.read_bytes() == before


def test_a_foreign_file_is_left_alone(tmp_path):
    path = tmp_path / "p"
    path.write_bytes(b"somebody's notes\n")
    with pytest.raises(PartialError, match="is no partial calibration"):
        reopened(path)
    assert path.read_bytes() == b"somebody's notes\n"


def test_one_process_at_a_time_writes(path):
    with PartialFile(path, BINDING), pytest.raises(PartialError, match="another calibration writes it"):
        reopened(path)


def test_counts_of_another_model_are_refused_against_what_was_finished(path):
    with PartialFile(path, BINDING) as partial:
        other = RequestCounts("d", signature(7, 7, "g"), None)
        with pytest.raises(RequestCountsError, match="counts of 'd': fingerprint is g, expected f"):
            partial.add(other)
    assert list(reopened(path).rows) == ["a", "b", "c"]


def test_a_removed_file_is_gone(path):
    with PartialFile(path, BINDING) as partial:
        partial.remove()
    assert not path.exists()
