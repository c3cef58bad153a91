"""Expert counts per physical KV block (paper section 4, signature cache)."""

import torch


class SignatureCache:
    """One row [layers, experts] per KV block, written with the block and reset when its first slot is rewritten.

    A request's counts are the sum of its blocks' rows, so a prefix-cache hit gives the same signature as a cold
    prefill. Invariant: a row holds exactly the picks of the tokens whose KV the block holds, or, for a block
    passed to `forget`, nothing. uint8 rows suffice for blocks of up to 255 tokens, since a token selects an
    expert at most once; larger blocks take int32.
    """

    def __init__(
        self, blocks: int, layers: int, experts: int, block_size: int, device: torch.device | str
    ) -> None:
        dtype = torch.uint8 if block_size <= 255 else torch.int32
        self.rows = torch.zeros((blocks, layers, experts), dtype=dtype, device=device)
        self.block_size = block_size
        self._layer_offset = (torch.arange(layers, device=device) * experts).view(1, layers, 1)

    @property
    def nbytes(self) -> int:
        """Memory of the rows in bytes."""
        return self.rows.numel() * self.rows.element_size()

    def add(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Counts the picks of this step's tokens.

        slots: int [tokens], KV slot of each token; negative ones (padding) are left out.
        ids: int32 [tokens, layers, top_k], logical expert ids; negative ones were not captured and count nothing.
        """
        real = slots >= 0
        slots = slots.long()
        block = torch.div(slots, self.block_size, rounding_mode="floor").clamp_min_(0)
        self.rows[block[(slots % self.block_size == 0) & real]] = 0
        layers, experts = self.rows.shape[1:]
        index = block.view(-1, 1, 1) * (layers * experts) + self._layer_offset + ids.clamp_min(0)
        known = (ids >= 0) & real.view(-1, 1, 1)
        self.rows.view(-1).scatter_add_(0, index.reshape(-1), known.reshape(-1).to(self.rows.dtype))

    def forget(self, blocks: list[int]) -> None:
        """Clears the rows of blocks whose contents were not computed here (case 1.1)."""
        if blocks:
            self.rows[torch.as_tensor(blocks, dtype=torch.long, device=self.rows.device)] = 0

    def total(self, blocks: list[int]) -> torch.Tensor:
        """Sum of the blocks' rows, int32 [layers, experts]."""
        index = torch.as_tensor(blocks, dtype=torch.long, device=self.rows.device)
        return self.rows.index_select(0, index).sum(0, dtype=torch.int32)
