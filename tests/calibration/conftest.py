from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eldr.calibration.counts import Counts

MakeCounts = Callable[..., Counts]


def draw(rng: np.random.Generator, shares: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    """Counts [layers, experts] of tokens that each pick top_k distinct experts, by shares [layers, experts]."""
    layers, experts = shares.shape
    noise = rng.gumbel(size=(tokens, layers, experts)) + np.log(shares)
    picks = np.argsort(-noise, axis=2)[:, :, :top_k]
    return np.stack([np.bincount(picks[:, layer].ravel(), minlength=experts) for layer in range(layers)])


@pytest.fixture
def make_counts() -> MakeCounts:
    """Counts of `requests` in `groups` domains that prefer different experts; fields can be replaced."""

    def make(
        requests: int = 40,
        groups: int = 4,
        layers: int = 3,
        experts: int = 12,
        seed: int = 0,
        **changes: Any,
    ) -> Counts:
        rng = np.random.default_rng(seed)
        shares = rng.gamma(0.3, 1.0, size=(groups, layers, experts)) + 0.01
        domain = np.arange(requests) % groups
        length = rng.integers(20, 60, size=requests)
        fields: dict[str, Any] = {
            "ids": tuple(f"r{row}" for row in range(requests)),
            "fingerprint": "model-a",
            "top_k": 2,
            "moe_layers": tuple(range(layers)),
            "prompt_len": length,
            "prefill_counts": np.stack(
                [draw(rng, shares[d], n, 2) for d, n in zip(domain, length, strict=True)]
            ),
            "decode_counts": np.stack([draw(rng, shares[d], 30, 2) for d in domain]),
            "domains": tuple(f"domain-{d}" for d in domain),
        }
        return Counts(**{**fields, **changes})

    return make
