"""What every implementation of a step's reduction does, in which order, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_NO_SLOTS = np.empty(0, np.int64)
_NO_SLOTS.flags.writeable = False


@dataclass(slots=True)
class StepWork:
    """One step's picks and what shall become of them.

    ids: int32 [tokens, layers, top_k] on the reducer's device, logical expert ids; a token's are distinct. One
        outside [0, experts) was not captured: it counts nowhere and voids the union. On the host also one
        array [tokens, top_k] for each layer, of any integer type.
    slots: int64 [tokens], KV slot of each token, distinct; on the device, or as a numpy array still on the host.
        One outside the cache (padding is -1) leaves its token out of the rows. None: unknown for the whole step.
    forget: blocks whose rows become empty before anything is counted.
    complete: KV blocks of each prompt whose counts are wanted.
    wanted: int64 [n], slots of tokens whose picks are wanted.
    union: whether the step's expert union is wanted. Every token counts for it, whatever its slot.
    """

    ids: torch.Tensor | Sequence[npt.NDArray[Any]]
    slots: torch.Tensor | npt.NDArray[np.int64] | None = None
    forget: Sequence[int] = ()
    complete: Sequence[Sequence[int]] = ()
    wanted: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_SLOTS)
    union: bool = False

    @property
    def asks(self) -> bool:
        """Whether anything is to be returned."""
        return self.union or bool(self.complete) or self.wanted.size > 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """Results of one step, on the host.

    counts: int32 [layers, experts] for each of `StepWork.complete`, this step's tokens included.
    picks: int32 [n, layers, top_k] for `StepWork.wanted`; -1 where a slot is not in the step.
    union: bool [layers, experts]. None where it was not asked for and where a pick was not captured.
    """

    counts: Sequence[npt.NDArray[np.int32]] = ()
    picks: npt.NDArray[np.int32] | None = None
    union: npt.NDArray[np.bool_] | None = None


class Pending(Protocol):
    """Results that may still be on their way from the device."""

    @property
    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        ...

    def result(self) -> Reduced:
        """The results; waits for the device where it must. From one thread at a time, any thread."""
        ...


class StepReducer(Protocol):
    """Reduces steps in the order in which they are given, never waiting for the device.

    In this order: the rows of `forget` become empty; so do rows whose block's first slot is among `slots` (the
    block is being filled anew); each pick is added to its token's row; then counts, picks and union are taken.
    The order of the tokens does not matter.
    """

    def reduce(self, work: StepWork) -> Pending:
        """Starts one step's reduction."""
        ...
