"""Which cores an engine computes on."""

import os
from collections.abc import Iterator

import pytest

from eldr.engine.cpu_cores import affinity_kept


@pytest.fixture
def cores() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.fail("this machine has one core; the tests need two")
    yield before
    os.sched_setaffinity(0, before)


def test_a_thread_gets_its_cores_back_from_a_connector_that_binds_it(cores: set[int]) -> None:
    with affinity_kept():
        os.sched_setaffinity(0, {max(cores)})
    assert os.sched_getaffinity(0) == cores


def test_a_thread_gets_its_cores_back_where_the_connector_fails(cores: set[int]) -> None:
    def failing() -> None:
        with affinity_kept():
            os.sched_setaffinity(0, {max(cores)})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert os.sched_getaffinity(0) == cores
