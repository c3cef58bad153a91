"""The decoders as policies see them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eldr.router.fleet import Fleet, Member
from eldr.routing.carried import WINDOW_STEPS, CarriedBookings
from eldr.routing.contract import Booking, DecoderView
from eldr.routing.state import DecoderState
from eldr.rpc.worker_info import WorkerInfo, WorkerRole


@dataclass(slots=True)
class _ModelViews:
    """The views of one model by row. `changed` are rows to be made anew, `out` those that take no work.

    All others hold until `until_s`, when the first of them goes stale.
    """

    members: tuple[Member, ...]
    rows: Mapping[str, int]
    views: list[DecoderView]
    fleet: tuple[DecoderView, ...]
    until_s: float
    changed: set[int] = field(default_factory=set)
    out: set[int] = field(default_factory=set)


class DecoderViews:
    """Views are kept until something in them changes, so that policies may cache by identity.

    `bookings` gives those of a worker. Whoever changes a worker's bookings, or drains it, calls `changed`.
    """

    def __init__(self, fleet: Fleet, bookings: Callable[[str], Mapping[str, Booking]]) -> None:
        self._fleet = fleet
        self._bookings = bookings
        self._models: dict[str, _ModelViews] = {}
        self._views: dict[str, DecoderView] = {}
        self._carried: dict[str, CarriedBookings] = {}
        self._fresh: dict[str, tuple[tuple[Booking, float], ...]] = {}

    def of(self, model: str, now_s: float) -> tuple[DecoderView, ...]:
        """The decoders of a model, sorted by worker id."""
        members = self._fleet.members(WorkerRole.DECODE, model)
        kept = self._models.get(model)
        if kept is None or kept.members is not members or now_s > kept.until_s:
            return self._all(model, members, now_s).fleet
        if kept.changed or kept.out:
            for row in kept.changed | kept.out:
                view = self._view(members[row], now_s)
                kept.views[row] = view
                (kept.out.add if view.ineligible else kept.out.discard)(row)
            kept.changed.clear()
            kept.fleet = tuple(kept.views)
        return kept.fleet

    def _all(self, model: str, members: tuple[Member, ...], now_s: float) -> _ModelViews:
        views = [self._view(member, now_s) for member in members]
        made = self._models[model] = _ModelViews(
            members=members,
            rows={member.info.worker_id: row for row, member in enumerate(members)},
            views=views,
            fleet=tuple(views),
            until_s=min(
                (
                    self._fleet.eligible_until_s(member)
                    for member, view in zip(members, views, strict=True)
                    if not view.ineligible
                ),
                default=math.inf,
            ),
            out={row for row, view in enumerate(views) if view.ineligible},
        )
        return made

    def _view(self, member: Member, now_s: float) -> DecoderView:
        worker_id = member.info.worker_id
        ineligible = self._fleet.ineligible(member, now_s)
        view = self._views.get(worker_id)
        if view is None or view.ineligible != ineligible:
            view = self._views[worker_id] = DecoderView(
                worker_id=worker_id,
                state=member.state,
                bookings=dict(self._bookings(worker_id)),
                max_num_seqs=member.info.max_num_seqs,
                ineligible=ineligible,
                group=member.info.engine_version,
                fresh=self._fresh.get(worker_id, ()),
            )
        return view

    def changed(self, worker_id: str) -> None:
        """Something in the worker's view is different now."""
        self._views.pop(worker_id, None)
        for kept in self._models.values():
            row = kept.rows.get(worker_id)
            if row is not None:
                kept.changed.add(row)

    def reported(self, info: WorkerInfo, previous: DecoderState | None, state: DecoderState) -> None:
        """A report came in, and its worker's bookings have been renewed."""
        worker_id = info.worker_id
        self.changed(worker_id)
        carried = self._carried.get(worker_id)
        if carried is None:
            carried = self._carried[worker_id] = CarriedBookings(info.hit_window_steps or WINDOW_STEPS)
        self._fresh[worker_id] = carried.report(previous, state, self._bookings(worker_id))

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self.changed(worker_id)
        self._carried.pop(worker_id, None)
        self._fresh.pop(worker_id, None)
