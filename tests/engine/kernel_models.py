"""Models, random picks and a slow device for the tests of the reduction.

The Triton kernel runs on a GPU (`-m gpu`), and in Triton's interpreter where TRITON_INTERPRET=1 is set before Triton
is imported.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from eldr.engine.kernels import reducer_for
from eldr.engine.kernels.contract import StepReducer
from eldr.engine.signature_cache import SignatureCache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_DEVICE = pytest.mark.engine if INTERPRETED else pytest.mark.gpu
DEVICE = "cpu" if INTERPRETED else "cuda"


class InterpretedMark:
    """Reached when somebody waited for it; only then do the copies before it happen."""

    def __init__(self, link: "InterpretedLink") -> None:
        self._link = link
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set(self) -> None:
        self._before, self._link.copies = self._link.copies, []

    def reached(self) -> bool:
        return not self._before

    def wait(self) -> None:
        self._link.waits += 1
        for target, source in self._before:
            target.copy_(source)
        self._before = []


class InterpretedLink:
    """A device whose copies to the host arrive as late as they may."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        # Kept alive, so that no other memory ever has one of these addresses.
        self._host: dict[int, torch.Tensor] = {}

    def host_buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.full((length,), -7, dtype=dtype)
        self._host[buffer.data_ptr()] = buffer
        return buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.data_ptr() in self._host:
            self.copies.append((target, source))
        else:
            target.copy_(source)

    def new_mark(self) -> InterpretedMark:
        return InterpretedMark(self)


@dataclass
class Model:
    """A model's shape, its cache and the reducer under test."""

    layers: int
    experts: int
    top_k: int
    cache: SignatureCache | None
    reducer: StepReducer
    device: str

    def rows(self) -> npt.NDArray[np.int64]:
        assert self.cache is not None
        return self.cache.rows.cpu().numpy().astype(np.int64)

    def ids(self, picks: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(picks).to(self.device)

    def slots(self, slots: Any) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64).to(self.device)


def model_of(
    kind: str, layers: int = 3, experts: int = 8, top_k: int = 2, block_size: int = 8, blocks: int = 6
) -> Model:
    """blocks = 0: no cache, as on a decode worker."""
    device = "cpu" if kind == "vectorised" else DEVICE
    cache = SignatureCache(blocks, layers, experts, block_size, device) if blocks else None
    if kind == "triton" and INTERPRETED:
        from eldr.engine.kernels.device import DeviceReducer

        reducer: StepReducer = DeviceReducer(layers, experts, top_k, cache, InterpretedLink(), 16)
    else:
        reducer = reducer_for(device, layers, experts, top_k, cache)
    return Model(layers, experts, top_k, cache, reducer, device)


def random_picks(rng: np.random.Generator, tokens: int, model: Model) -> npt.NDArray[np.int32]:
    ranks = rng.random((tokens, model.layers, model.experts)).argsort(axis=2)
    return ranks[:, :, : model.top_k].astype(np.int32)


def union_of(ids: npt.NDArray[np.int32], experts: int) -> npt.NDArray[np.bool_] | None:
    if ((ids < 0) | (ids >= experts)).any():
        return None
    touched = np.zeros((ids.shape[1], experts), bool)
    for token in ids:
        for layer, picks in enumerate(token):
            touched[layer, picks] = True
    return touched
