"""The decoders as policies see them."""

from collections.abc import Callable, Mapping

from eldr.router.fleet import Member
from eldr.routing.carried import WINDOW_STEPS, CarriedBookings
from eldr.routing.contract import Booking, DecoderView
from eldr.routing.state import DecoderState
from eldr.rpc.worker_info import WorkerInfo


class DecoderViews:
    """Views are kept until something in them changes, so that policies may cache by identity.

    `bookings` gives those of a worker. Whoever changes a worker's bookings calls `changed`.
    """

    def __init__(self, bookings: Callable[[str], Mapping[str, Booking]]) -> None:
        self._bookings = bookings
        self._views: dict[str, DecoderView] = {}
        self._carried: dict[str, CarriedBookings] = {}
        self._fresh: dict[str, tuple[tuple[Booking, float], ...]] = {}

    def view(self, member: Member, ineligible: str) -> DecoderView:
        """The view of a member; `ineligible` is why it takes no work now, "" where it does."""
        worker_id = member.info.worker_id
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
