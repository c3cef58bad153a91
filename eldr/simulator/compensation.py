"""A router core that counts less of what it placed itself: for measuring what that compensation is worth."""

import dataclasses
from enum import StrEnum
from typing import Any

from eldr.router.core import RouterCore
from eldr.routing.contract import DecoderView


class Compensation(StrEnum):
    """Which of the router's own placements are added to the experts that a decoder reported."""

    FULL = "full"
    UNREPORTED = "unreported"
    """Those that no report contains yet, and not those that a report's hit frequency holds in part."""
    NONE = "none"


class LessCompensated(RouterCore):
    """Requests in flight count as ever; only their experts are left out of what policies see."""

    def __init__(self, compensation: Compensation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compensation = compensation
        self._seen: dict[str, tuple[DecoderView, DecoderView]] = {}

    def views(self, model: str = "") -> tuple[DecoderView, ...]:
        """See `RouterCore.views`."""
        return tuple(self._less(view) for view in super().views(model))

    def _less(self, view: DecoderView) -> DecoderView:
        known = self._seen.get(view.worker_id)
        if known is None or known[0] is not view:
            bookings = view.bookings
            if self._compensation is Compensation.NONE:
                bookings = {
                    rid: dataclasses.replace(booking, signature=None) for rid, booking in bookings.items()
                }
            known = self._seen[view.worker_id] = (
                view,
                dataclasses.replace(view, bookings=bookings, fresh=()),
            )
        return known[1]
