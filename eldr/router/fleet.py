"""Membership and health of the workers. Synchronous; the time, of the router's own clock, is passed in."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from eldr.routing.state import DecoderState
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.rpc.worker_status import WorkerHealth
from eldr.signature.geometry import GeometryError, ModelGeometry


class FleetMismatchError(ValueError):
    """A worker that does not fit the fleet; the message has both values."""


class UnknownWorkerError(KeyError):
    """No worker of that id is registered."""

    def __str__(self) -> str:
        return f"no worker {self.args[0]!r} is registered"


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Ages of the last sign of life, in seconds, from which a worker gets no work, is dead, is forgotten."""

    stale_s: float = 5.0
    dead_s: float = 30.0
    forget_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.stale_s <= self.dead_s:
            raise ValueError(
                f"stale_s must be above 0 and at most dead_s ({self.dead_s:g}), got {self.stale_s:g}"
            )
        if not self.forget_s >= self.dead_s:
            raise ValueError(f"forget_s must be at least dead_s ({self.dead_s:g}), got {self.forget_s:g}")


@dataclass(slots=True)
class Member:
    """One registered worker. `seen_s` is when its last sign of life arrived, None before the first.

    Reports are the signs of life of a decode worker; registrations and answered probes those of a prefill
    worker. `held` are the hand-offs of a prefill worker that no decoder has pulled yet, by its last probe.
    """

    info: WorkerInfo
    registered_s: float
    seen_s: float | None = None
    state: DecoderState | None = None
    draining: bool = False
    held: int = 0


class Report(Enum):
    """What became of a decoder's report."""

    ACCEPTED = "accepted"
    OUT_OF_ORDER = "out_of_order"
    OTHER_INCARNATION = "other_incarnation"
    UNKNOWN_WORKER = "unknown_worker"


class Fleet:
    """One entry per worker id and per address; roles, models and health are read from the entries.

    Members of one served model share geometry, KV block size and KV layout. `generation` grows with every change
    of membership, role or health. `on_end` is called with the worker id of every process that leaves the fleet,
    replaced, restarted, forgotten or removed.
    """

    MAX_REMOVED = 1000

    def __init__(self, limits: HealthLimits, on_end: Callable[[str], None] = lambda worker_id: None) -> None:
        self._limits = limits
        self._on_end = on_end
        self._members: dict[str, Member] = {}
        self._sorted: dict[tuple[WorkerRole | None, str | None], tuple[Member, ...]] = {}
        self._removed: dict[tuple[str, str], None] = {}
        self._last_health: dict[str, WorkerHealth] = {}
        self.generation = 0

    def members(self, role: WorkerRole | None = None, model: str | None = None) -> tuple[Member, ...]:
        """Members of one role and one served model, or of all, sorted by worker id. Kept until one changes."""
        found = self._sorted.get((role, model))
        if found is None:
            found = self._sorted[role, model] = tuple(
                member
                for _, member in sorted(self._members.items())
                if role in (None, member.info.role) and model in (None, member.info.served_model)
            )
        return found

    def models(self) -> list[str]:
        """Names of the models that have members, sorted."""
        return sorted({member.info.served_model for member in self._members.values()})

    def member(self, worker_id: str) -> Member:
        """Raises UnknownWorkerError."""
        try:
            return self._members[worker_id]
        except KeyError:
            raise UnknownWorkerError(worker_id) from None

    def geometry(self, model: str) -> ModelGeometry | None:
        """The geometry that all members of a served model share, None while there are none."""
        return next((member.info.geometry for member in self.members(model=model)), None)

    def find(self, worker_id: str) -> Member | None:
        """The member of an id, None where it is not registered."""
        return self._members.get(worker_id)

    def register(self, info: WorkerInfo, now_s: float) -> bool:
        """Adds a worker, or replaces the entries of the same id or the same address. Idempotent.

        True where the entry is new or differs from the one before.

        Raises FleetMismatchError where the worker does not fit the others of its served model, or was removed by
        an operator and has not restarted since. Others that are dead are no bar: a worker that does not fit them
        ends them.
        """
        known = self._members.get(info.worker_id)
        if known is not None and known.info == info:
            if info.role is WorkerRole.PREFILL:
                known.seen_s = now_s
            return False
        if (info.worker_id, info.incarnation) in self._removed:
            raise FleetMismatchError(f"worker {info.worker_id} was removed; restart it to let it join again")
        if known is None or not _same_process(known.info, info):
            known = None
            self._drop_predecessors(info)
        self._require_fit(info, known, now_s)
        self._sorted.clear()
        if known is not None:
            known.info = info
        else:
            alive_s = now_s if info.role is WorkerRole.PREFILL else None
            self._members[info.worker_id] = Member(info, registered_s=now_s, seen_s=alive_s)
        self.generation += 1
        return True

    def _require_fit(self, info: WorkerInfo, known: Member | None, now_s: float) -> None:
        misfits = []
        for other in self.members(model=info.served_model):
            if other is known:
                continue
            try:
                _require_fit(info, other.info)
            except FleetMismatchError:
                if self.health(other, now_s) is not WorkerHealth.DEAD:
                    raise
                misfits.append(other.info.worker_id)
        for worker_id in misfits:
            self._end(worker_id)

    def _drop_predecessors(self, info: WorkerInfo) -> None:
        for worker_id, member in list(self._members.items()):
            if (
                worker_id == info.worker_id
                or member.info.grpc_address == info.grpc_address
                or member.info.http_url == info.http_url
            ):
                self._end(worker_id)

    def _end(self, worker_id: str) -> None:
        del self._members[worker_id]
        self._sorted.clear()
        self.generation += 1
        self._on_end(worker_id)

    def report(self, state: DecoderState, now_s: float) -> Report:
        """Takes a decoder's report in, unless it is of another process or older than the last one.

        Age is counted from here on by the router's clock; the sender's clock is never compared with it.
        """
        member = self._members.get(state.worker_id)
        if member is None or member.info.role is not WorkerRole.DECODE:
            return Report.UNKNOWN_WORKER
        if member.info.incarnation != state.incarnation:
            return Report.OTHER_INCARNATION
        if member.state is not None and state.sequence < member.state.sequence:
            return Report.OUT_OF_ORDER
        member.state = state
        member.seen_s = now_s
        return Report.ACCEPTED

    def drain(self, worker_id: str) -> None:
        """No new work for this process of the worker. Raises UnknownWorkerError."""
        member = self.member(worker_id)
        if not member.draining:
            member.draining = True
            self.generation += 1

    def forget(self, now_s: float) -> list[str]:
        """Ends the entries of workers that have been silent for `forget_s`; they may come back."""
        gone = [
            worker_id
            for worker_id, member in self._members.items()
            if _silence_s(member, now_s) > self._limits.forget_s
        ]
        for worker_id in gone:
            self._end(worker_id)
        return gone

    def remove(self, worker_id: str) -> bool:
        """Forgets a worker; the same process is not let in again. False where it was unknown."""
        member = self._members.get(worker_id)
        if member is None:
            return False
        self._end(worker_id)
        self._removed[worker_id, member.info.incarnation] = None
        while len(self._removed) > self.MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        return True

    def health(self, member: Member, now_s: float) -> WorkerHealth:
        """Health by the age of the last sign of life."""
        age_s = _silence_s(member, now_s)
        if age_s > self._limits.dead_s:
            return WorkerHealth.DEAD
        if member.seen_s is not None and age_s > self._limits.stale_s:
            return WorkerHealth.SUSPECT
        if member.draining or (member.state is not None and member.state.draining):
            return WorkerHealth.DRAINING
        return WorkerHealth.STARTING if member.seen_s is None else WorkerHealth.LIVE

    def is_well(self, info: WorkerInfo, now_s: float) -> bool:
        """Whether this very process is a member that shows signs of life."""
        member = self._members.get(info.worker_id)
        silent = (WorkerHealth.STARTING, WorkerHealth.SUSPECT, WorkerHealth.DEAD)
        return member is not None and member.info == info and self.health(member, now_s) not in silent

    def eligible_until_s(self, member: Member) -> float:
        """When a member that takes work now will take none for want of a sign of life."""
        if member.seen_s is None:
            return member.registered_s + self._limits.dead_s
        return member.seen_s + self._limits.stale_s

    def ineligible(self, member: Member, now_s: float) -> str:
        """Why a worker gets no new work, empty where it does."""
        health = self.health(member, now_s)
        if health in (WorkerHealth.LIVE, WorkerHealth.STARTING):
            return ""
        if health is WorkerHealth.DRAINING:
            return "draining"
        if member.seen_s is None:
            return f"dead: no sign of life since it registered {now_s - member.registered_s:.1f} s ago"
        word = "dead: silent" if health is WorkerHealth.DEAD else "stale"
        return f"{word} {now_s - member.seen_s:.1f} s"

    def tick(self, now_s: float) -> bool:
        """Notes changes of health since the last call; True where `generation` grew for one."""
        health = {worker_id: self.health(member, now_s) for worker_id, member in self._members.items()}
        changed = health != self._last_health
        self._last_health = health
        self.generation += changed
        return changed


def _silence_s(member: Member, now_s: float) -> float:
    return now_s - (member.registered_s if member.seen_s is None else member.seen_s)


def _same_process(before: WorkerInfo, now: WorkerInfo) -> bool:
    return all(
        getattr(before, name) == getattr(now, name) for name in ("incarnation", "role", "served_model")
    )


def _require_fit(info: WorkerInfo, other: WorkerInfo) -> None:
    mine, theirs = f"worker {info.worker_id}", f"worker {other.worker_id}"
    try:
        info.geometry.require_same(other.geometry, mine, theirs)
    except GeometryError as error:
        raise FleetMismatchError(str(error)) from error
    for field in ("block_size", "kv_layout"):
        a, b = getattr(info, field), getattr(other, field)
        if a != b:
            raise FleetMismatchError(f"{field} differs: {mine} has {a!r}, {theirs} has {b!r}")
