"""The breakers as legs meet them: who is admitted, what a failed leg counts as, what is left out of a choice."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import structlog

from eldr.client import WorkerRef, WorkerRole
from eldr.gateway.breaker import Breakers, Fault, Ticket
from eldr.gateway.counters import Counts, Event
from eldr.gateway.errors import BarredError, LegError
from eldr.gateway.legs import ReplyError

log = structlog.get_logger()


class Guard:
    """Judges the legs of one gateway."""

    def __init__(self, breakers: Breakers, counts: Counts) -> None:
        self._breakers = breakers
        self._counts = counts

    def excluded(self, failed: Collection[str]) -> list[str]:
        """Workers that have failed a request, and those that get none now."""
        return sorted(self._breakers.excluded().union(failed))

    @contextmanager
    def leg(self, held: ExitStack, worker: WorkerRef, role: WorkerRole) -> Iterator[Ticket]:
        """Around one leg. `held` closes its ticket. Raises BarredError where no leg may go there now."""
        ticket = self._breakers.admit(worker.worker_id, worker.incarnation, role)
        if ticket is None:
            self._counts[Event.BREAKER_REFUSED] += 1
            raise BarredError(worker.worker_id, "it gets no request now, its last ones failed")
        held.callback(ticket.close)
        try:
            yield ticket
        except LegError as error:
            self.failed(worker.worker_id, ticket, error.fault)
            raise
        except ReplyError:
            self.failed(worker.worker_id, ticket, Fault.ANSWERED)
            raise

    def failed(self, worker_id: str, ticket: Ticket, fault: Fault) -> None:
        """A leg failed."""
        if ticket.failed(fault):
            self._counts[Event.BREAKER_OPENED] += 1
            log.warning("breaker_opened", worker=worker_id, fault=fault.name.lower())
