"""What the locality band needs of a fitted profile."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from eldr.signature.expert_signature import ExpertSignature


class Locality(Protocol):
    """Centroids in signature space. `eldr.calibration.profile.Profile` is one."""

    @property
    def clusters(self) -> int:
        """Number of centroids K, at least 1."""
        ...

    def similarities(self, signature: ExpertSignature) -> npt.NDArray[np.float32] | None:
        """Cosine of the signature's vector with each centroid, float32 [K].

        None where the signature has no vector under this profile (zero norm). Raises SignatureError for a
        signature of another model, which the router refuses before any policy sees it.
        """
        ...


class LiveLocality(Protocol):
    """Centroids that change while the router runs. `eldr.calibration.live.LiveLocality` is one."""

    @property
    def owners(self) -> tuple[str, ...] | None:
        """Worker id per centroid; empty where positions decide as in `locality-band`, None without centroids."""
        ...

    def similarities(self, signature: ExpertSignature) -> npt.NDArray[np.float32] | None:
        """As `Locality.similarities`; also None without centroids."""
        ...
