"""Policy `locality-band-online`: the locality band on centroids that are refitted to the live traffic.

The published artifact's online refit: signatures of the last 5 s, refitted every second behind the decisions. The
centroids come from a `LiveLocality` that somebody else refits; a decision only reads it.
"""

from collections.abc import Mapping

import numpy as np

from eldr.routing.contract import DecoderView, PolicyError
from eldr.routing.eligibility import Floats
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.locality import LiveLocality
from eldr.routing.locality_band import UNSCORED, LocalityBand, by_position
from eldr.routing.options import Option, resolve
from eldr.signature.expert_signature import ExpertSignature


class LocalityBandOnline(LocalityBand):
    """As `LocalityBand`, but a refit gives each decoder a centroid of its own.

    Before the first refit a profile's centroids are owned by position. Without a profile there are none, and load
    decides: the fallback `no-centroids`. A decoder that joined since the last refit shares the centroid at its
    position: `awaiting-refit`. The centroid of one that left is nobody's.
    """

    name = "locality-band-online"
    OPTIONS: Mapping[str, Option] = {
        **LocalityBand.OPTIONS,
        "window_s": Option(5.0, 0.25, 600.0, "Age of the oldest signature that a refit sees."),
        "interval_s": Option(1.0, 0.25, 600.0, "Time between the beginnings of two refits."),
        "rows_per_decoder": Option(4, 1, 1_000, "Fewest signatures per decoder for a refit."),
    }

    def __init__(
        self, live: LiveLocality | None, options: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        if live is None:
            raise PolicyError("policy locality-band-online needs live centroids, which only a router refits")
        self.options = resolve(self.name, self.OPTIONS, options or {})
        self._live = live
        self._seed = seed
        self._by_load = JoinShortestQueue(seed)

    def _similarities(
        self, signature: ExpertSignature, eligible: list[DecoderView], fleet: tuple[DecoderView, ...]
    ) -> tuple[Floats | None, str]:
        owners = self._live.owners
        if owners is None:
            return None, "no-centroids"
        found = self._live.similarities(signature)
        if found is None:
            return None, "unusable-signature"
        finite = np.isfinite(found)
        if not finite.any():
            return None, "non-finite"
        fallback = "" if finite.all() else "non-finite"
        similarity = np.where(finite, found, UNSCORED).astype(np.float64)
        owned = by_position(similarity, eligible, fleet)
        if not owners:
            return owned, fallback
        place = {owner: i for i, owner in enumerate(owners)}
        for i, view in enumerate(eligible):
            if view.worker_id in place:
                owned[i] = similarity[place[view.worker_id]]
            else:
                fallback = fallback or "awaiting-refit"
        return owned, fallback
