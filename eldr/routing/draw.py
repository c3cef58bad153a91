"""Seeded randomness without state: the same seed and request draw the same, in any process."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def draw(seed: int, request_id: str, choices: Sequence[T]) -> T:
    """One of `choices`, uniformly over request ids. `choices` must not be empty."""
    if len(choices) == 1:
        return choices[0]
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return choices[int.from_bytes(digest, "little") % len(choices)]
