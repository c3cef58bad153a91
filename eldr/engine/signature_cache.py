"""Expert counts per physical KV block (paper section 4, signature cache)."""

import torch

LARGEST_BYTE_BLOCK = 255
"""Tokens of the largest block whose counts fit a byte: a token selects an expert at most once."""

_ROW_ALIGNMENT = 4


class SignatureCache:
    """One row [layers, experts] per KV block, written with the block and emptied when its first slot is rewritten.

    A request's counts are the sum of its blocks' rows, so a prefix-cache hit gives the same signature as a cold
    prefill. Invariant: a row holds exactly the picks of the tokens whose KV the block holds, or, for a block
    passed to `forget`, nothing. Steps are added by a `StepReducer`; the methods here are for single blocks.

    storage: uint8 [blocks, layers, experts rounded up to whole words], int32 where blocks exceed 255 tokens.
    rows: its view [blocks, layers, experts].
    """

    def __init__(
        self, blocks: int, layers: int, experts: int, block_size: int, device: torch.device | str
    ) -> None:
        dtype = torch.uint8 if block_size <= LARGEST_BYTE_BLOCK else torch.int32
        row = -(-experts // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self.storage = torch.zeros((blocks, layers, row), dtype=dtype, device=device)
        self.rows = self.storage[:, :, :experts]
        self.block_size = block_size

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return self.storage.numel() * self.storage.element_size()

    def forget(self, blocks: list[int]) -> None:
        """Clears the rows of blocks whose contents were not computed here (case 1.1). Waits for the device."""
        if blocks:
            self.rows[torch.as_tensor(blocks, dtype=torch.long, device=self.rows.device)] = 0

    def total(self, blocks: list[int]) -> torch.Tensor:
        """Sum of the blocks' rows, int32 [layers, experts]. Waits for the device."""
        index = torch.as_tensor(blocks, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, index).sum(0, dtype=torch.int32)
