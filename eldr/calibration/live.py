"""Live traffic in signature space: the space, the centroids in force, and the last signatures."""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eldr.calibration.refit import Centroids
from eldr.signature.expert_signature import ExpertSignature, SignatureError

Float32Array = npt.NDArray[np.float32]

MAX_WINDOW = 1_024
"""Signatures that are kept: 25 MB for 48 layers of 128 experts."""


class Space(Protocol):
    """How a signature becomes a vector. `eldr.calibration.profile.Profile` is one."""

    def vector(self, signature: ExpertSignature) -> Float32Array | None:
        """Unit vector, or None where the signature has no direction. SignatureError for another model's."""
        ...


class CountSpace:
    """Plain counts of all layers: what serves where there is no profile to say more."""

    def vector(self, signature: ExpertSignature) -> Float32Array | None:
        """Counts, flattened, divided by their norm; None for a signature without tokens."""
        counts = signature.counts.reshape(-1).astype(np.float32)
        norm = np.sqrt(counts @ counts)
        return counts / norm if 0.0 < norm < np.inf else None


class LiveLocality:
    """The space and the centroids that `locality-band-online` reads; `centroids` may be replaced at any time.

    A reader sees the old centroids or the new ones, never a mixture. None: there are none yet.
    """

    def __init__(self, space: Space | None = None, centroids: Centroids | None = None) -> None:
        self.space: Space = space or CountSpace()
        self.centroids = centroids

    @property
    def owners(self) -> tuple[str, ...] | None:
        """Worker id per centroid, empty where positions decide, None where there are no centroids."""
        return None if self.centroids is None else self.centroids.owners

    def similarities(self, signature: ExpertSignature) -> Float32Array | None:
        """Cosine with each centroid, float32 [clusters]; None where the signature has no place in the space."""
        if self.centroids is None:
            return None
        vector = self.space.vector(signature)
        if vector is None or vector.shape != self.centroids.rows.shape[1:]:
            return None
        similar: Float32Array = self.centroids.rows @ vector
        return similar


class SignatureWindow:
    """The last signatures and when they came; newer ones push the oldest out at `limit`."""

    def __init__(self, limit: int = MAX_WINDOW) -> None:
        self._kept: deque[tuple[float, ExpertSignature]] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, signature: ExpertSignature, now_s: float) -> None:
        """Keeps a reference; nothing is computed."""
        self._kept.append((now_s, signature))

    def since(self, begin_s: float) -> tuple[ExpertSignature, ...]:
        """Signatures that came at `begin_s` or later and are of the newest one's model, the oldest first."""
        if not self._kept:
            return ()
        newest = self._kept[-1][1]
        found: list[ExpertSignature] = []
        for came_s, signature in reversed(self._kept):
            if came_s < begin_s:
                break
            if (signature.fingerprint, signature.shape) == (newest.fingerprint, newest.shape):
                found.append(signature)
        return tuple(reversed(found))

    def clear(self) -> None:
        """Forgets all."""
        self._kept.clear()


def unit_vectors(space: Space, signatures: Sequence[ExpertSignature]) -> Float32Array:
    """Vectors of the signatures that have one, float32 [at most signatures, dimensions]; [0, 0] where none has."""
    rows = []
    for signature in signatures:
        try:
            row = space.vector(signature)
        except SignatureError:  # of another model than the profile's; the caller sees that rows are missing
            continue
        if row is not None:
            rows.append(row)
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)
