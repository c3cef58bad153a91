import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eldr.router.prefill import choose_prefill, preference

WORKERS = [f"p{i}" for i in range(8)]


def test_equal_prefixes_meet_on_one_worker():
    idle = dict.fromkeys(WORKERS, 0)
    assert len({choose_prefill(b"def f(", idle) for _ in range(5)}) == 1


def test_only_the_first_1024_bytes_count():
    assert preference(b"x" * 1024 + b"a", WORKERS) == preference(b"x" * 1024 + b"b", WORKERS)


def test_different_prefixes_are_spread():
    idle = dict.fromkeys(WORKERS, 0)
    placed = Counter(choose_prefill(f"prompt {i}".encode(), idle) for i in range(800))
    assert min(placed.values()) > 60


def test_a_hot_prefix_spills_beyond_a_quarter_over_the_mean():
    loads = dict.fromkeys(WORKERS, 0)
    for _ in range(80):
        loads[choose_prefill(b"the same system prompt", loads)] += 1
    assert max(loads.values()) <= 13
    assert sum(loads.values()) == 80


def test_a_worker_that_leaves_moves_only_its_own_keys():
    idle = dict.fromkeys(WORKERS, 0)
    fewer = dict.fromkeys(WORKERS[:-1], 0)
    keys = [f"prompt {i}".encode() for i in range(200)]
    moved = [key for key in keys if choose_prefill(key, idle) != choose_prefill(key, fewer)]
    assert all(choose_prefill(key, idle) == WORKERS[-1] for key in moved)


@given(
    st.binary(max_size=20),
    st.dictionaries(st.sampled_from(WORKERS), st.integers(0, 50), min_size=1),
)
def test_there_is_always_room_somewhere(key, loads):
    assert choose_prefill(key, loads) in loads


def test_every_process_agrees():
    """Case 3.23: keys that cross processes do not depend on PYTHONHASHSEED."""
    code = (
        "from eldr.router.prefill import preference; print(preference(b'abc', [f'p{i}' for i in range(8)]))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
