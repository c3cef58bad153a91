"""Which KV slots count towards block rows where tokens are drafted: those of prompt tokens."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Slots = TypeVar("Slots", torch.Tensor, npt.NDArray[np.int64])


class PromptSlots:
    """Keeps drafted tokens out of the block rows, exactly and without knowing which drafts were accepted.

    A rejected draft's slot is written again by another token, so a row that counted both would be wrong. Which
    drafts were accepted is known a step later, and their positions under asynchronous scheduling not even then.
    What is certain from the moment a block is handed out is how many of its leading slots hold prompt tokens.
    So only those count, and generated tokens that a later prompt finds in the prefix cache stay uncovered.
    """

    def __init__(self, blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._capacity = blocks * block_size
        self._leading = np.full(blocks, block_size, dtype=np.int64)
        self._leading_on_device = torch.from_numpy(self._leading).to(device)

    def handed_out(self, blocks: list[int], limits: dict[int, int]) -> None:
        """New `blocks` count whole, those in `limits` only their so many leading slots."""
        leading = {**dict.fromkeys(blocks, self._block_size), **limits}
        if leading:
            index = list(leading)
            self._leading[index] = list(leading.values())
            if self._leading_on_device.device.type != "cpu":
                self._leading_on_device[index] = torch.tensor(
                    list(leading.values()), device=self._leading_on_device.device
                )

    def only(self, slots: Slots) -> Slots:
        """`slots` int [tokens] as they are where they count, `beyond` the cache where they do not."""
        leading = self._leading if isinstance(slots, np.ndarray) else self._leading_on_device
        held = leading[(slots // self._block_size).clip(0)]
        return slots + ((slots >= 0) & (slots % self._block_size >= held)) * self._capacity

    def beyond(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where `only` puts slots that do not count."""
        return slots + self._capacity
