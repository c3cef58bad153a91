"""Policy `locality-band`: the least loaded of the decoders whose centroids are nearest (paper section 4)."""

from collections.abc import Mapping

import numpy as np

from eldr.routing.contract import Candidate, Decision, DecodeRequest, DecoderView, PolicyError
from eldr.routing.draw import draw
from eldr.routing.eligibility import Floats, Mask, eligible_decoders, fewest, loads, within_load
from eldr.routing.jsq import JoinShortestQueue
from eldr.routing.locality import Locality
from eldr.routing.options import Option, resolve
from eldr.signature.expert_signature import ExpertSignature

UNSCORED = -9.0
"""Below every band: a centroid without a finite similarity is the last choice, never the first."""


class LocalityBand:
    """Band s >= max - tau over the eligible decoders, then fewest in flight.

    Decoder i of D, in order of worker id, owns the centroids k with k % D == i, or centroid i % K where
    D > K; its similarity is the highest of its own. With one decoder left in the band and tau > 0 the best
    two are taken. Where every decoder of the band is over the load bound (`within_load`), the band is taken
    over the others: the fallback `load-bound`.
    """

    name = "locality-band"
    OPTIONS: Mapping[str, Option] = {
        "tau": Option(0.1, 0.0, 2.0, "Width of the band in cosine. 0 is locality alone, 2 load alone."),
        "max_load_ratio": Option(2.0, 0.0, 1e6, "Most load against the least loaded decoder. 0: unbounded."),
    }

    def __init__(
        self, locality: Locality | None, options: Mapping[str, float] | None = None, seed: int = 0
    ) -> None:
        if locality is None:
            raise PolicyError("policy locality-band needs a profile: load one made by `eldr fit`")
        self.options: Mapping[str, float] = resolve(self.name, self.OPTIONS, options or {})
        self._locality = locality
        self._seed = seed
        self._by_load = JoinShortestQueue(seed)

    def select(self, request: DecodeRequest, fleet: tuple[DecoderView, ...]) -> Decision:
        """See `Policy.select`."""
        eligible, left_out = eligible_decoders(request, fleet)
        if request.signature is None:
            return self._load_only(request, fleet, request.signature_problem)
        owned, fallback = self._similarities(request.signature, eligible, fleet)
        if owned is None:
            return self._load_only(request, fleet, fallback)
        load = loads(eligible)
        bounded = within_load(load, self.options["max_load_ratio"])
        band = self._band(owned, np.ones_like(bounded))
        among = band & bounded
        if not among.any():
            fallback = "load-bound"
            among = self._band(owned, bounded)
        tied = fewest(eligible, load, among)
        nearest = [index for index in tied if owned[index] == owned[tied].max()]
        picked = draw(self._seed, request.request_id, nearest)

        candidates = [
            Candidate(
                view.worker_id,
                bool(among[i]),
                1.0 - float(owned[i]) if owned[i] > UNSCORED else float("nan"),
                f"similarity {owned[i]:.3f}, " + _place(bool(band[i]), bool(bounded[i])),
                view.in_flight,
            )
            for i, view in enumerate(eligible)
        ]
        reason = (
            f"fewest in flight ({eligible[picked].in_flight}) of {int(among.sum())} in the band, "
            f"similarity {owned[picked]:.3f}"
        )
        return Decision(
            eligible[picked].worker_id, self.name, reason, (*candidates, *left_out), fallback=fallback
        )

    def _similarities(
        self, signature: ExpertSignature, eligible: list[DecoderView], fleet: tuple[DecoderView, ...]
    ) -> tuple[Floats | None, str]:
        """Best similarity of each eligible decoder, float64 [eligible], or None; and the fallback taken."""
        centroid = self._locality.similarities(signature)
        if centroid is None:
            return None, "unusable-signature"
        finite = np.isfinite(centroid)
        if not finite.any():
            return None, "non-finite"
        owned = by_position(np.where(finite, centroid, UNSCORED).astype(np.float64), eligible, fleet)
        return owned, "" if finite.all() else "non-finite"

    def _band(self, owned: Floats, among: Mask) -> Mask:
        tau = self.options["tau"]
        similar = np.where(among, owned, -np.inf)
        band: Mask = similar >= similar.max() - tau
        if tau > 0 and band.sum() == 1 and among.sum() > 1:
            band |= (similar >= np.partition(similar, -2)[-2]) & (similar > UNSCORED)
        return band

    def _load_only(self, request: DecodeRequest, fleet: tuple[DecoderView, ...], fallback: str) -> Decision:
        by_load = self._by_load.select(request, fleet)
        reason = f"{fallback}: {by_load.reason}"
        return Decision(by_load.worker_id, self.name, reason, by_load.candidates, fallback=fallback)


def by_position(similarity: Floats, eligible: list[DecoderView], fleet: tuple[DecoderView, ...]) -> Floats:
    """Best similarity [clusters] of the centroids that each eligible decoder owns by its position in the fleet."""
    decoders, clusters = len(fleet), len(similarity)
    position = {worker_id: i for i, worker_id in enumerate(sorted(view.worker_id for view in fleet))}
    return np.array(
        [similarity[(position[view.worker_id] % clusters) :: decoders].max() for view in eligible],
        dtype=np.float64,
    )


def _place(in_band: bool, bounded: bool) -> str:
    if not bounded:
        return "over the load bound"
    return "in the band" if in_band else "outside the band"
