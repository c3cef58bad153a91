import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from eldr.calibration.counts_file import Counts, CountsError, load_counts, load_merged, save_counts


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def trace() -> dict[str, np.ndarray]:
    """Keys of a trace of other origin: picks per step, no ids, no fingerprint."""
    ids = np.stack(
        [np.random.default_rng(row).permuted(np.arange(6)[None].repeat(20, 0), axis=1) for row in range(5)]
    )
    ids = ids.reshape(5, 10, 2, 6)[..., :2].astype(np.uint8)
    prompt_len = np.full(5, 9, dtype=np.int32)
    prefill = np.zeros((5, 2, 6), dtype=np.int16)
    prefill[:, :, [0, 3]] = 9
    return {
        "domain": np.array(["a", "b", "a", "b", "a"]),
        "prefill_counts": prefill,
        "prompt_len": prompt_len,
        "decode_ids": ids,
        "decode_prob": np.zeros((5, 2, 6), dtype=np.float16),
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_a_saved_file_loads_as_it_was(make_counts, tmp_path):
    counts = make_counts(moe_layers=(1, 3, 5))
    save_counts(counts, tmp_path / "counts.npz")
    again = load_counts(tmp_path / "counts.npz")
    for name in ("ids", "domains", "fingerprint", "top_k", "moe_layers"):
        assert getattr(again, name) == getattr(counts, name)
    for name in ("prompt_len", "prefill_counts", "decode_counts"):
        assert np.array_equal(getattr(again, name), getattr(counts, name))
    assert again.decode_ids is None


def test_gate_sums_survive_saving(make_counts, tmp_path):
    sums = np.random.default_rng(0).random((40, 3, 12)).astype(np.float32)
    save_counts(make_counts(gate_probability=sums, gate_logit=-sums), tmp_path / "counts.npz")
    again = load_counts(tmp_path / "counts.npz")
    assert np.array_equal(again.gate_probability, sums)
    assert np.array_equal(again.gate_logit, -sums)


def test_gate_probability_is_found_under_its_name_in_the_testbeds_traces(trace, tmp_path):
    sums = np.ones(trace["prefill_counts"].shape, np.float16)
    assert load_counts(write(tmp_path / "t.npz", trace | {"prefill_prob": sums})).gate_probability is not None
    assert load_counts(write(tmp_path / "u.npz", trace)).gate_probability is None


def test_several_files_load_as_one(make_counts, tmp_path):
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for path in paths:
        ids = tuple(f"{path.stem}{row}" for row in range(40))
        save_counts(make_counts(ids=ids), path)
    assert load_merged(paths).ids == tuple(f"{name}{row}" for name in "ab" for row in range(40))


def test_a_part_that_does_not_fit_is_named(make_counts, tmp_path):
    save_counts(make_counts(), tmp_path / "a.npz")
    save_counts(make_counts(fingerprint="other"), tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"junk")
    with pytest.raises(CountsError, match=r"part 2 has fingerprint 'other'.*\(parts: 1 a.npz, 2 b.npz\)"):
        load_merged([tmp_path / "a.npz", tmp_path / "b.npz"])
    with pytest.raises(CountsError, match=r"^c\.npz: not an npz file"):
        load_merged([tmp_path / "a.npz", tmp_path / "c.npz"])
    with pytest.raises(CountsError, match=r"^b\.npz: holds \d+ bytes, at most \d+ are read"):
        load_merged([tmp_path / "a.npz", tmp_path / "b.npz"], max_bytes=8_000)


def test_equal_counts_give_equal_bytes(make_counts, tmp_path):
    for name in ("a", "b"):
        save_counts(make_counts(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_trace_of_other_origin_loads_without_a_fingerprint(trace, tmp_path):
    counts = load_counts(write(tmp_path / "t.npz", trace))
    assert (counts.fingerprint, counts.top_k, counts.moe_layers) == ("", 2, (0, 1))
    assert counts.ids == ("0", "1", "2", "3", "4")
    assert counts.domains == ("a", "b", "a", "b", "a")
    assert (counts.decode_tokens == 10).all()
    assert (
        counts.decode_counts[3, 1].tolist()
        == np.bincount(trace["decode_ids"][3, :, 1].ravel(), minlength=6).tolist()
    )


def test_picks_per_step_survive_saving(trace, tmp_path):
    trace["decode_len"] = np.array([10, 4, 0, 10, 10])
    counts = load_counts(write(tmp_path / "t.npz", trace))
    assert counts.decode_tokens.tolist() == [10, 4, 0, 10, 10]
    save_counts(counts, tmp_path / "again.npz")
    again = load_counts(tmp_path / "again.npz")
    assert np.array_equal(again.decode_ids, trace["decode_ids"])
    assert np.array_equal(again.decode_counts, counts.decode_counts)


def test_top_k_is_read_off_the_sums_where_nothing_says_it(trace, tmp_path):
    trace["decode_counts"] = trace["prefill_counts"]
    del trace["decode_ids"]
    assert load_counts(write(tmp_path / "t.npz", trace)).top_k == 2
    trace["prompt_len"] = np.full(5, 7)
    with pytest.raises(CountsError, match="row 0: 18 picks in layer 0 are no multiple of prompt_len 7"):
        load_counts(write(tmp_path / "t.npz", trace))


def test_an_unlabelled_file_loads(trace, tmp_path):
    del trace["domain"]
    assert load_counts(write(tmp_path / "t.npz", trace)).domains == ("",) * 5


def test_pickled_objects_are_refused_and_never_run(trace, tmp_path):
    """Case 5.9."""
    marker = tmp_path / "marker"
    trace["ids"] = np.array([Marker(marker)] * 5, dtype=object)
    with pytest.raises(CountsError, match="cannot be read at key ids"):
        load_counts(write(tmp_path / "t.npz", trace))
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(CountsError, match="not an npz file"):
        load_counts(tmp_path / "plain.npz")
    assert not marker.exists()


def test_a_truncated_file_is_refused(trace, tmp_path):
    path = write(tmp_path / "t.npz", trace)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CountsError, match="not an npz file, or cut off"):
        load_counts(path)


def test_a_damaged_file_is_refused(trace, tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, **trace)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("decode_ids.npy").header_offset
    data[start + 300] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CountsError, match="cannot be read at key decode_ids: Bad CRC"):
        load_counts(path)


def test_arrays_beyond_the_limit_are_refused_before_they_are_read(trace, tmp_path):
    with pytest.raises(CountsError, match="at most 100 are read"):
        load_counts(write(tmp_path / "t.npz", trace), max_bytes=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eldr_counts_version": np.array(2)}, "counts version 2, this eldr reads up to 1"),
        ({"prefill_counts": None}, "key prefill_counts is missing"),
        ({"prompt_len": None}, "key prompt_len is missing"),
        ({"decode_ids": None}, "decode_ids or decode_counts must be there"),
        ({"prefill_counts": np.zeros((5, 6))}, r"must be \[requests, layers, experts\]"),
        ({"decode_ids": np.zeros((5, 10, 3, 2), np.uint8)}, "decode_ids must be integers"),
        ({"decode_ids": np.zeros((5, 10, 2, 2))}, "decode_ids must be integers"),
        ({"decode_len": np.array([10, 10, 11, 10, 10])}, "row 2: decode_len must be 0 to 10, got 11"),
        ({"decode_counts": np.zeros((5, 2, 6), np.int16)}, "row 0: decode_counts are not the sums"),
        ({"decode_counts": np.zeros((5, 2, 7), np.int16)}, "decode_counts are"),
        ({"ids": np.arange(5)}, "ids must be 5 texts"),
        ({"domain": np.array(["a"])}, "domain must be 5 texts"),
        ({"top_k": np.array("two")}, "top_k must be an integer"),
        ({"fingerprint": np.array(7)}, "fingerprint must be a text"),
        ({"moe_layers": np.arange(3)}, "moe_layers must be 2 ascending indices"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_name(trace, tmp_path, changes, message):
    arrays = {key: value for key, value in {**trace, **changes}.items() if value is not None}
    with pytest.raises(CountsError, match=message):
        load_counts(write(tmp_path / "t.npz", arrays))


def test_counts_is_importable_from_the_file_module():
    assert Counts.__module__ == "eldr.calibration.counts"
