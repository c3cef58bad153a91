"""What the router does, without its wire: decisions, bookings, membership, policy and profile.

Synchronous and on one thread, so that choosing and booking are one step. The clock is passed in.
"""

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping

import structlog

from eldr.calibration.profile import Profile
from eldr.observability.histogram import Histogram
from eldr.router.addresses import AllowedAddresses
from eldr.router.broadcast import Broadcast
from eldr.router.counters import Counters, Gauges
from eldr.router.decoder_views import DecoderViews
from eldr.router.drains import Drains
from eldr.router.errors import NoWorkerError, UnknownModelError
from eldr.router.fleet import Fleet, Member, Report
from eldr.router.ledger import Ledger
from eldr.router.lessons import DecodeLessons
from eldr.router.messages import Answer, Booked, DecisionMade
from eldr.router.models import Models
from eldr.router.prefill import choose_prefill
from eldr.router.settings import RouterSettings
from eldr.router.signatures import ReadSignature
from eldr.routing.contract import (
    Booking,
    Decision,
    DecodeRequest,
    DecoderView,
    NoEligibleDecoderError,
)
from eldr.routing.predictor import Predictor
from eldr.routing.state import DecoderState
from eldr.routing.step_time import observe
from eldr.rpc.outcome import Outcome
from eldr.rpc.worker_info import WorkerInfo, WorkerRole
from eldr.rpc.worker_status import WorkerHealth, WorkerStatus
from eldr.signature.geometry import ModelGeometry

log = structlog.get_logger()

Clock = Callable[[], float]

DECISION_BOUNDS_S = (20e-6, 40e-6, 60e-6, 100e-6, 200e-6, 400e-6, 1e-3, 2e-3, 5e-3, 20e-3)


class RouterCore:
    """The central state of one router.

    Invariant: a worker that is replaced, restarted or removed takes its bookings with it, so that its
    successor inherits none.
    """

    def __init__(
        self,
        settings: RouterSettings,
        profile: Profile | None = None,
        clock: Clock = time.monotonic,
        predictor: Callable[[], Predictor] = Predictor,
    ) -> None:
        self.settings = settings
        self.counters = Counters()
        self.gauges = Gauges()
        self.decision_seconds = Histogram(DECISION_BOUNDS_S)
        self.decisions: Broadcast[DecisionMade] = Broadcast()
        self.changes: Broadcast[int] = Broadcast(backlog=1)
        """Generations of the fleet; the newest is enough for a slow reader."""
        self._lessons = DecodeLessons(self.counters, self.gauges)
        self.fleet = Fleet(settings.health, on_end=self._forget)
        self.models = Models(settings, self.fleet, profile, predictor)
        self._clock = clock
        self._allowed = AllowedAddresses(settings.allow_workers)
        self._ledgers: Mapping[WorkerRole, Ledger[Answer]] = {
            WorkerRole.PREFILL: Ledger(settings.prefill_ttl_s),
            WorkerRole.DECODE: Ledger(settings.reservation_ttl_s),
        }
        self._views = DecoderViews(self.fleet, self._ledgers[WorkerRole.DECODE].bookings)
        self._drains = Drains()

    # Decisions.

    def select_prefill(
        self, prefix: bytes, model: str = "", reservation_id: str = "", exclude: frozenset[str] = frozenset()
    ) -> Booked:
        """Picks and books a prefill worker.

        Raises NoWorkerError, UnknownModelError, RequestError, AlreadyReleasedError.
        """
        now_s = self._clock()
        reservation_id = reservation_id or uuid.uuid4().hex
        ledger = self._ledgers[WorkerRole.PREFILL]
        booked = self._replay(ledger, reservation_id, now_s)
        if booked is not None:
            return booked
        members: dict[str, Member] = {}
        reasons = []
        for member in self.fleet.members(WorkerRole.PREFILL, self.models.find(model).name):
            worker_id = member.info.worker_id
            reason = self.fleet.ineligible(member, now_s)
            if reason or worker_id in exclude:
                reasons.append(f"{worker_id}: {reason or 'excluded by the caller'}")
            else:
                members[worker_id] = member
        if not members:
            self.counters.add("eldr_no_worker_total", role="prefill")
            raise NoWorkerError(
                f"no prefill worker is eligible: {'; '.join(reasons)}"
                if reasons
                else "no prefill worker is registered"
            )
        loads = {worker_id: len(ledger.bookings(worker_id)) for worker_id in members}
        info = members[choose_prefill(prefix or reservation_id.encode(), loads)].info
        ledger.reserve(info.worker_id, Booking(reservation_id, None), Answer(info), now_s)
        self.counters.add("eldr_reservations_total", role="prefill")
        return Booked(reservation_id, info, ledger.ttl_s)

    def reserve_decode(
        self, request: DecodeRequest, model: str = "", prefill_reservation_id: str = ""
    ) -> Booked:
        """Picks and books a decode worker, and ends the prefill booking that led to it.

        The reservation's id is `request.request_id`, made up where that is empty.
        Raises NoWorkerError, UnknownModelError, RequestError, AlreadyReleasedError.
        """
        now_s = self._clock()
        begun_s = time.perf_counter()
        request = _with_id(request)
        ledger = self._ledgers[WorkerRole.DECODE]
        booked = self._replay(ledger, request.request_id, now_s)
        if booked is not None:
            return booked
        routing = self.models.find(model)
        try:
            decision = routing.select(request, self.views(routing.name))
        except NoEligibleDecoderError as error:
            self.counters.add("eldr_no_worker_total", role="decode")
            raise NoWorkerError(str(error)) from error
        info = self.fleet.member(decision.worker_id).info
        booking = Booking(request.request_id, request.signature, request.prompt_tokens, request.max_tokens)
        ledger.reserve(info.worker_id, booking, Answer(info, decision), now_s)
        self._views.changed(info.worker_id)
        if prefill_reservation_id:
            self.release(WorkerRole.PREFILL, prefill_reservation_id, Outcome.COMPLETED)
        self._count_decision(request, decision)
        if request.signature is not None:
            routing.remember(request.signature, now_s)
        seconds = time.perf_counter() - begun_s
        self.decision_seconds.observe(seconds)
        self.decisions.publish(DecisionMade(request.request_id, info, decision, seconds))
        return Booked(request.request_id, info, ledger.ttl_s, decision)

    def explain_decode(
        self, request: DecodeRequest, model: str = "", policy: str = ""
    ) -> tuple[Decision, WorkerInfo | None]:
        """What `reserve_decode` would decide now, under the policy in force or another one.

        Changes nothing. Without an eligible decoder the decision has no worker, and its candidates say why.
        Raises UnknownModelError, RequestError, PolicyError.
        """
        routing = self.models.find(model)
        try:
            decision = routing.dry_run(_with_id(request), self.views(routing.name), policy)
        except NoEligibleDecoderError as error:
            return Decision("", policy or routing.policy[0], str(error), error.candidates), None
        return decision, self.fleet.member(decision.worker_id).info

    def release(
        self,
        role: WorkerRole,
        reservation_id: str,
        outcome: Outcome,
        output_tokens: int = 0,
        decoded: ReadSignature | None = None,
    ) -> bool:
        """Ends a booking. Idempotent: False where there was none.

        `decoded` are the picks of the tokens that the request decoded, where somebody counted them: the
        predictor of decode shares learns from them.
        """
        entry = self._ledgers[role].release(reservation_id, self._clock())
        if entry is None:
            self.counters.add("eldr_releases_unknown_total", role=role.value)
            return False
        if role is WorkerRole.DECODE:
            self._views.changed(entry.worker_id)
            if decoded is not None:
                self._lessons.take(self.models.of(entry.answer.worker), entry.booking, decoded)
        self.counters.add("eldr_releases_total", role=role.value, outcome=outcome.value)
        self.counters.add("eldr_output_tokens_total", output_tokens)
        return True

    def booked_geometry(self, reservation_id: str) -> ModelGeometry | None:
        """The geometry of the model that a decode booking is for, None where there is no such booking."""
        entry = self._ledgers[WorkerRole.DECODE].get(reservation_id)
        return None if entry is None else entry.answer.worker.geometry

    def views(self, model: str = "") -> tuple[DecoderView, ...]:
        """The decoders of a model as policies see them; views are kept until something in them changes."""
        return self._views.of(self.models.find(model).name, self._clock())

    def prepare(self, model: str = "") -> None:
        """Does what the model's next decision would begin with; to be called once a call has been answered."""
        try:
            routing = self.models.find(model)
        except UnknownModelError:  # Another model has taken its room meanwhile.
            return
        routing.prepare(self.views(routing.name))

    # Fleet.

    def register(self, info: WorkerInfo) -> bool:
        """Adds or replaces a worker; True where something changed.

        Raises FleetMismatchError, ProfileMismatchError, AddressNotAllowedError.
        """
        self._allowed.require(info)
        self.models.require_room(info)
        changed = self.fleet.register(info, self._clock())
        if changed:
            self.models.admit(info)
            self._views.changed(info.worker_id)
            self.counters.add("eldr_registrations_total", role=info.role.value)
            log.info(
                "worker_registered",
                worker_id=info.worker_id,
                role=info.role.value,
                model=info.served_model,
                incarnation=info.incarnation,
                http_url=info.http_url,
            )
            self.changes.publish(self.fleet.generation)
        return changed

    def report(self, state: DecoderState) -> Report:
        """Takes a decoder's report in: its state, the bookings that it carries, and its step times."""
        now_s = self._clock()
        member = self.fleet.find(state.worker_id)
        previous = member.state if member else None
        hit = state.hit_frequency
        if member is not None and hit is not None and hit.shape != member.info.geometry.shape:
            self.counters.add("eldr_frequency_mismatches_total", worker_id=state.worker_id)
            state = dataclasses.replace(state, hit_frequency=None)
        result = self.fleet.report(state, now_s)
        self.counters.add("eldr_reports_total", result=result.value)
        if result is not Report.ACCEPTED or member is None:
            return result
        self._ledgers[WorkerRole.DECODE].carry(state.worker_id, state.reservation_ids, now_s)
        self._views.reported(member.info, previous, state)
        seen = observe(previous, state, member.info.geometry.experts)
        if seen is not None:
            self.models.of(member.info).step_times.model(member.info.engine_version).observe(seen)
        return result

    def held(self, info: WorkerInfo, transfers: int) -> None:
        """A prefill worker answered a probe: so many hand-offs wait there for a decoder."""
        member = self.fleet.find(info.worker_id)
        if member is not None and member.info == info:
            member.held = transfers

    def drain(self, worker_id: str, limit_s: float | None = None) -> int:
        """No new work for a worker; returns its bookings. Raises UnknownWorkerError.

        With a limit it is removed once it has nothing left to do, or when the limit is over; without one it
        stays until somebody removes it.
        """
        self.fleet.drain(worker_id)
        self._views.changed(worker_id)
        if limit_s is not None:
            self._drains.begin(worker_id, limit_s, self._clock())
        self.tick()
        self.changes.publish(self.fleet.generation)
        log.info("worker_draining", worker_id=worker_id, limit_s=limit_s)
        member = self.fleet.find(worker_id)
        return 0 if member is None else self._bookings(member)

    def remove(self, worker_id: str) -> bool:
        """Forgets a worker and its bookings. False where it was unknown."""
        removed = self.fleet.remove(worker_id)
        if removed:
            log.info("worker_removed", worker_id=worker_id)
            self.changes.publish(self.fleet.generation)
        return removed

    def workers(self) -> list[WorkerStatus]:
        """Every worker, sorted by worker id."""
        now_s = self._clock()
        return [
            WorkerStatus(
                info=member.info,
                health=self.fleet.health(member, now_s),
                bookings=self._bookings(member),
                state_age_s=-1.0 if member.seen_s is None else now_s - member.seen_s,
                state=member.state,
                reason=self.fleet.ineligible(member, now_s),
            )
            for member in self.fleet.members()
        ]

    def tick(self) -> bool:
        """To be called a few times a second: expires bookings, ends drains, forgets the dead, notes health.

        True where membership or health changed.
        """
        now_s = self._clock()
        for role, ledger in self._ledgers.items():
            for entry in ledger.expire(now_s):
                self._views.changed(entry.worker_id)
                self.counters.add("eldr_reservations_expired_total", role=role.value)
                log.warning(
                    "reservation_expired",
                    reservation_id=entry.booking.reservation_id,
                    worker_id=entry.worker_id,
                )
        for worker_id, end in self._drains.over(now_s, lambda worker_id: self._is_idle(worker_id, now_s)):
            self.counters.add("eldr_drains_total", end=end.value)
            self.remove(worker_id)
        gone = self.fleet.forget(now_s)
        for worker_id in gone:
            self.counters.add("eldr_workers_forgotten_total")
            log.info("worker_forgotten", worker_id=worker_id)
        changed = self.fleet.tick(now_s) or bool(gone)
        if changed:
            self.changes.publish(self.fleet.generation)
        return changed

    def now_s(self) -> float:
        """The core's clock."""
        return self._clock()

    def close(self) -> None:
        """Ends every stream of events."""
        self.decisions.close()
        self.changes.close()

    # Inside.

    def _is_idle(self, worker_id: str, now_s: float) -> bool:
        """Whether a draining worker has nothing left to do, as far as it says itself."""
        member = self.fleet.member(worker_id)
        if self._bookings(member):
            return False
        if self.fleet.health(member, now_s) is WorkerHealth.DEAD or member.info.role is WorkerRole.PREFILL:
            return member.held == 0
        state = member.state
        return state is None or (state.draining and state.running + state.waiting == 0)

    def _replay(self, ledger: Ledger[Answer], reservation_id: str, now_s: float) -> Booked | None:
        entry = ledger.find(reservation_id, now_s)
        if entry is None:
            return None
        self.counters.add("eldr_replays_total")
        answer = entry.answer
        return Booked(reservation_id, answer.worker, max(0.0, entry.expires_at_s - now_s), answer.decision)

    def _count_decision(self, request: DecodeRequest, decision: Decision) -> None:
        self.counters.add("eldr_reservations_total", role="decode")
        self.counters.add("eldr_decisions_total", policy=decision.policy)
        result = "ok" if request.signature is not None else request.signature_problem
        self.counters.add("eldr_signatures_total", result=result)
        if decision.fallback:
            self.counters.add("eldr_fallbacks_total", policy=decision.policy, fallback=decision.fallback)

    def _bookings(self, member: Member) -> int:
        return len(self._ledgers[member.info.role].bookings(member.info.worker_id))

    def _forget(self, worker_id: str) -> None:
        self._views.forget(worker_id)
        self._drains.forget(worker_id)
        for routing in self.models.all():
            routing.step_times.forget(worker_id)
        for ledger in self._ledgers.values():
            dropped = ledger.drop_worker(worker_id)
            if dropped:
                self.counters.add("eldr_reservations_dropped_total", dropped)


def _with_id(request: DecodeRequest) -> DecodeRequest:
    return request if request.request_id else dataclasses.replace(request, request_id=uuid.uuid4().hex)
