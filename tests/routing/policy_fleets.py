"""Fleets, requests and simulated bookings for the tests of the policies."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from eldr.routing.contract import Booking, DecodeRequest, DecoderView, Policy
from eldr.routing.registry import POLICIES, Sources, make_policy
from eldr.routing.state import DecoderState
from eldr.signature.expert_signature import ExpertSignature
from eldr.testing.signatures import FAKE_GEOMETRY, fake_signature

SHAPE = FAKE_GEOMETRY.shape


class TableLocality:
    """A Locality that answers what the test wants."""

    def __init__(self, *similarities: float) -> None:
        self._similarities = np.array(similarities, np.float32)
        self.clusters = len(similarities)

    def similarities(self, signature: ExpertSignature) -> "np.typing.NDArray[np.float32] | None":
        return self._similarities if self.clusters else None


class TableLive(TableLocality):
    """A LiveLocality that answers what the test wants."""

    def __init__(self, *similarities: float, owners: tuple[str, ...] | None = ()) -> None:
        super().__init__(*similarities)
        self.owners = owners


def state(worker_id: str, running: int = 0, **changes: Any) -> DecoderState:
    return DecoderState(worker_id, f"{worker_id}-1", sequence=1, running=running, **changes)


def view(worker_id: str, running: int = 0, ineligible: str = "", **changes: Any) -> DecoderView:
    return DecoderView(worker_id, state(worker_id, running, **changes), ineligible=ineligible)


def silent_view(worker_id: str) -> DecoderView:
    return DecoderView(worker_id, None)


def equal_fleet(decoders: int) -> tuple[DecoderView, ...]:
    return tuple(view(f"d{i}") for i in range(decoders))


def request(
    request_id: str = "r0", signature: ExpertSignature | None = None, **changes: Any
) -> DecodeRequest:
    return DecodeRequest(request_id, signature or fake_signature(), **changes)


def booked(fleet: tuple[DecoderView, ...], worker_id: str, asked: DecodeRequest) -> tuple[DecoderView, ...]:
    """The fleet after the router placed the request, no new report in between."""
    booking = Booking(asked.request_id, asked.signature)
    return tuple(
        dataclasses.replace(each, bookings={**each.bookings, asked.request_id: booking})
        if each.worker_id == worker_id
        else each
        for each in fleet
    )


def place(
    policy: Policy, fleet: tuple[DecoderView, ...], requests: list[DecodeRequest]
) -> tuple[Counter[str], tuple[DecoderView, ...]]:
    """Places requests one after the other while the reports stay frozen."""
    placed = Counter({each.worker_id: 0 for each in fleet})
    for asked in requests:
        worker_id = policy.select(asked, fleet).worker_id
        placed[worker_id] += 1
        fleet = booked(fleet, worker_id, asked)
    return placed, fleet


def every_policy(decoders: int, seed: int = 0) -> list[Policy]:
    similarities = np.linspace(0.9, 0.1, max(1, decoders)).tolist()
    sources = Sources(seed=seed, locality=TableLocality(*similarities), live=TableLive(*similarities))
    return [make_policy(name, {}, sources) for name in sorted(POLICIES)]
