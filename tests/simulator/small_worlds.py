"""Small scenarios and prompts for the simulator's tests."""

from typing import Any

import numpy as np

from eldr.signature.expert_signature import ExpertSignature
from eldr.simulator.scenario import Scenario, scenario_of
from eldr.simulator.world import FINGERPRINT, Prompt

SHAPE = (2, 8)
TOP_K = 2


def tiny(**changes: Any) -> Scenario:
    """Two domains on four decoders, six seconds."""
    raw: dict[str, Any] = {
        "name": "tiny",
        "mix": {"a": 60, "b": 40},
        "rate": 20,
        "duration_s": 6,
        "warmup_s": 1,
        "calibration_requests": 60,
        "output": {"tokens": 40},
        "world": {"shape": {"layers": 3, "experts": 16, "top_k": 2, "subdomains": 2}},
        "fleet": {"prefill": 2, "decode": 4},
    }
    return scenario_of(raw | changes)


def prompt(experts: tuple[int, ...] = (0, 1), tokens: int = 10, steps: int = 4) -> Prompt:
    """Takes the same experts at every token of every layer."""
    counts = np.zeros(SHAPE, np.int64)
    counts[:, experts] = tokens
    shares = (counts / tokens).astype(np.float32)
    routes = np.broadcast_to(np.array(experts, np.uint8), (steps, SHAPE[0], TOP_K)).copy()
    return Prompt("a", ExpertSignature(FINGERPRINT, TOP_K, tokens, tokens, counts), shares, routes)
