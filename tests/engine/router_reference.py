"""Expert counts as transformers' own router modules select them, for any architecture and prompt length."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from integration.reference.hf_counts import HfReference


class RouterReference(HfReference):
    """Listens to the routers of a transformers model instead of taking the top-k of its router logits.

    So it knows dense layers, biased and sigmoid scores. `layers` are the indices of the MoE layers, ascending.
    `chunk` tokens are run at a time, which bounds the memory of long prompts.
    """

    def __init__(self, model: str | Path, chunk: int = 1 << 30) -> None:
        super().__init__(model)
        self._chunk = chunk
        self._selected: list[torch.Tensor] = []
        routers = [
            (name, module)
            for name, module in self._model.named_modules()
            if type(module).__name__.endswith("Router")
        ]
        self.layers = tuple(int(name.split("layers.")[1].split(".")[0]) for name, _ in routers)
        for _, module in routers:
            module.register_forward_hook(self._select)

    def _select(self, _module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._selected.append(output[-1].reshape(-1, self.top_k))

    @torch.no_grad()
    def picks(self, token_ids: list[int]) -> npt.NDArray[np.int64]:
        """Selected experts of every token, [tokens, layers, top_k]."""
        cache, parts = None, []
        for start in range(0, len(token_ids), self._chunk):
            self._selected.clear()
            ids = torch.tensor([token_ids[start : start + self._chunk]])
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            parts.append(torch.stack(self._selected, 1))
        return torch.cat(parts).numpy()

    def parameter(self, name: str) -> torch.nn.Parameter:
        """A weight of the model, to be changed."""
        return self._model.get_parameter(name)
