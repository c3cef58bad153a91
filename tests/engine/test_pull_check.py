"""A decoder takes KV for received only when its prefill worker confirms it."""

from typing import Any

import pytest

from eldr.engine.pull_check import KvSource, PullCheck, source_of

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "remote_request_id": "cmpl-p-0",
    "eldr_prefill_grpc": "127.0.0.1:1",
    "eldr_prefill_incarnation": "i",
}


class Asked(list[tuple[str, KvSource]]):
    def __call__(self, request_id: str, source: KvSource) -> None:
        self.append((request_id, source))


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def check(asked: Asked) -> PullCheck:
    state = PullCheck(asked)
    state.arrived("a", PARAMS)
    return state


def test_a_pull_is_held_back_until_it_is_confirmed(check: PullCheck, asked: Asked) -> None:
    assert check.settle({"a"}, set()) == set()
    assert asked == [("a", KvSource("cmpl-p-0", "127.0.0.1:1", "i"))]
    assert check.waits
    assert check.settle(set(), set()) == set()
    check.answered("a", True)
    assert check.settle(set(), set()) == {"a"}
    assert not check.waits
    assert check.take_refused() == []


def test_a_pull_that_came_too_late_fails_like_any_load_and_is_counted(check: PullCheck) -> None:
    """Case 2.1."""
    check.settle({"a"}, set())
    check.answered("a", False)
    assert check.settle(set(), set()) == set()
    assert check.take_refused() == ["a"]
    assert check.take_refused() == []
    assert check.refused_transfers == 1
    assert check.settle({"a"}, {"a"}) == {"a"}, "the workers' own report of it goes through"
    assert not check.waits


def test_a_load_that_nixl_itself_found_failed_is_not_asked_about(check: PullCheck, asked: Asked) -> None:
    assert check.settle({"a"}, {"a"}) == {"a"}
    assert asked == []


def test_a_request_that_ends_while_its_pull_is_checked_is_freed_at_the_next_step(check: PullCheck) -> None:
    """Case 2.6: vLLM keeps the blocks of an aborted request until it hears of the transfer."""
    check.settle({"a"}, set())
    check.left("a")
    assert check.waits
    assert check.settle(set(), set()) == {"a"}
    check.answered("a", False)
    assert check.settle(set(), set()) == set()
    assert (check.take_refused(), check.refused_transfers, check.waits) == ([], 0, False)


def test_a_request_that_ends_before_its_pull_is_not_asked_about(check: PullCheck, asked: Asked) -> None:
    check.left("a")
    assert check.settle({"a"}, set()) == {"a"}
    assert asked == []


def test_kv_of_a_prefill_worker_without_eldr_is_used_and_counted(asked: Asked) -> None:
    check = PullCheck(asked)
    check.arrived("a", {**PARAMS, "eldr_prefill_grpc": ""})
    assert check.settle({"a"}, set()) == {"a"}
    assert (asked, check.unchecked_transfers) == ([], 1)


@pytest.mark.parametrize(
    "params",
    [{}, {"do_remote_decode": True}, {**PARAMS, "transfer_mode": "push"}, {"do_remote_prefill": True}],
)
def test_only_pulls_have_a_source(params: dict[str, Any]) -> None:
    assert source_of(params) is None


def test_nothing_of_10000_requests_is_left(asked: Asked) -> None:
    check = PullCheck(asked)
    for number in range(10_000):
        name = str(number)
        check.arrived(name, PARAMS)
        check.settle({name}, set())
        if number % 3 == 0:
            check.left(name)
        check.answered(name, number % 2 == 0)
        check.settle(set(), set())
        check.take_refused()
        check.left(name)
    assert not any((check._sources, check._asked, check._gone, check._refused, check._answers))
