"""A run with a fixed number of requests in flight, as a client with that many connections sends them."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

from eldr.simulator.decoder import Running
from eldr.simulator.simulation import Arrival, Outcomes, Simulation


class ClosedLoop(Simulation):
    """The first `in_flight` requests arrive at their own times, each further one when a request has ended.

    The other arguments are those of Simulation. Raises ValueError for `in_flight` below 1.
    """

    def __init__(self, in_flight: int, *arguments: Any, **named: Any) -> None:
        if in_flight < 1:
            raise ValueError(f"in_flight must be at least 1, got {in_flight}")
        super().__init__(*arguments, **named)
        self._in_flight = in_flight
        self._held: deque[Arrival] = deque()

    def run(self, arrivals: Sequence[Arrival]) -> Outcomes:
        """Runs until every request has ended."""
        self._held = deque(arrivals[self._in_flight :])
        return super().run(arrivals[: self._in_flight])

    def _finish(self, request: Running) -> None:
        super()._finish(request)
        if self._held:
            self._open += 1
            self._arrive(dataclasses.replace(self._held.popleft(), at_s=self._now_s))
