"""The queue of a decoder as its connector sees it, where the patch 0001-scheduler-state-hook is missing."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class SeenRequests:
    """Stands in for vLLM's scheduler in a DecodeScheduler: the requests that passed through the connector.

    A request runs from the first step that schedules it until it is preempted or ends; before that it waits.
    """

    kv_cache_manager: Any
    _known: "dict[str, Request]" = field(default_factory=dict)
    _running: set[str] = field(default_factory=set)

    def arrived(self, request: "Request") -> None:
        """A request entered the engine."""
        self._known[request.request_id] = request

    def left(self, request_id: str) -> None:
        """A request ended, however."""
        self._known.pop(request_id, None)
        self._running.discard(request_id)

    def scheduled(self, scheduler_output: "SchedulerOutput") -> None:
        """A step was planned."""
        self._running.difference_update(scheduler_output.preempted_req_ids or ())
        self._running.update(scheduler_output.num_scheduled_tokens)

    @property
    def running(self) -> "list[Request]":
        """Requests that run, in no order."""
        return [self._known[request_id] for request_id in self._running]

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self._running), len(self._known) - len(self._running)
