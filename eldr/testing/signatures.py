"""Small signatures with a known preference."""

from collections.abc import Sequence

import numpy as np

from eldr.signature.expert_signature import ExpertSignature
from eldr.signature.geometry import ModelGeometry

FAKE_GEOMETRY = ModelGeometry(moe_layers=(1, 2), experts=8, top_k=2, fingerprint="fake-model")


def fake_signature(
    favourites: Sequence[int] = (0, 1), tokens: int = 32, geometry: ModelGeometry = FAKE_GEOMETRY
) -> ExpertSignature:
    """A prompt whose tokens select the favourites in turn, `top_k` of them each, in every layer.

    There must be at least `top_k` favourites.
    """
    if len(set(favourites)) < geometry.top_k:
        raise ValueError(f"favourites must be at least top_k = {geometry.top_k} experts, got {favourites}")
    picks = [favourites[i % len(favourites)] for i in range(tokens * geometry.top_k)]
    row = np.bincount(picks, minlength=geometry.experts)
    counts = np.tile(row, (geometry.layers, 1)).astype(np.uint32)
    return ExpertSignature(geometry.fingerprint, geometry.top_k, tokens, tokens, counts)
