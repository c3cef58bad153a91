"""The queue of a decoder as its connector counts it."""

from types import SimpleNamespace
from typing import Any

from eldr.engine.seen_requests import SeenRequests


def request(name: str, computed: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_computed_tokens=computed)


def step(*names: str, preempted: set[str] | None = None) -> Any:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), preempted_req_ids=preempted)


def seen(*names: str) -> SeenRequests:
    queue = SeenRequests(SimpleNamespace(usage=0.5))
    for name in names:
        queue.arrived(request(name, computed=len(name)))
    return queue


def test_a_request_waits_until_a_step_schedules_it_and_runs_until_it_ends() -> None:
    queue = seen("a", "bb", "ccc")
    assert queue.get_request_counts() == (0, 3)
    queue.scheduled(step("a", "bb"))
    assert queue.get_request_counts() == (2, 1)
    queue.scheduled(step("a"))
    assert queue.get_request_counts() == (2, 1), "a request that a step leaves out still runs"
    assert sum(one.num_computed_tokens for one in queue.running) == 3
    queue.left("bb")
    assert queue.get_request_counts() == (1, 1)


def test_a_preempted_request_waits_again() -> None:
    queue = seen("a", "b")
    queue.scheduled(step("a", "b"))
    queue.scheduled(step("a", preempted={"b"}))
    assert queue.get_request_counts() == (1, 1)
    queue.scheduled(step("a", "b"))
    assert queue.get_request_counts() == (2, 0)


def test_a_request_that_ends_while_it_waits_is_gone_and_a_second_end_changes_nothing() -> None:
    queue = seen("a")
    queue.left("a")
    queue.left("a")
    assert queue.get_request_counts() == (0, 0)
    assert queue.running == []
