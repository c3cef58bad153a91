"""Expert counts of token sequences by Hugging Face transformers in float32, independent of vLLM and eldr.

    python hf_counts.py MODEL PROMPTS.json COUNTS.npz

PROMPTS.json is a list of lists of token ids. COUNTS.npz gets `counts` int64 [prompts, layers, experts], in the order
of the prompts. They run one by one, without padding, cache or batching.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM


class HfReference:
    """A mixture-of-experts model whose top-k picks can be counted. One thread, so that it leaves a core free."""

    def __init__(self, model: str | Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        config = self._model.config
        self.experts: int = config.num_experts
        self.top_k: int = config.num_experts_per_tok

    @torch.no_grad()
    def picks(self, token_ids: list[int]) -> npt.NDArray[np.int64]:
        """Selected experts of every token, [tokens, layers, top_k]."""
        return torch.softmax(self._logits(token_ids), -1).topk(self.top_k, -1).indices.numpy()

    @torch.no_grad()
    def gate_sums(self, token_ids: list[int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Sums over the tokens of the softmax of the gate's logits and of the logits, both [layers, experts]."""
        logits = self._logits(token_ids).double()
        return torch.softmax(logits, -1).sum(0).numpy(), logits.sum(0).numpy()

    def _logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the gate, float32 [tokens, layers, experts]."""
        out = self._model(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
        layers = [layer.reshape(len(token_ids), self.experts) for layer in out.router_logits]
        return torch.stack(layers, 1).float()

    def counts(self, token_ids: list[int], split: int | None = None) -> list[npt.NDArray[np.int64]]:
        """Counts [layers, experts] of the first `split` tokens and of the rest; of all where it is None."""
        picks = self.picks(token_ids)
        parts = [picks] if split is None else [picks[:split], picks[split:]]
        return [self._count(part) for part in parts]

    def _count(self, picks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        one_hot = np.zeros((picks.shape[1], self.experts), np.int64)
        np.add.at(one_hot, (np.arange(picks.shape[1])[None, :, None], picks), 1)
        return one_hot


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("prompts", type=Path, help="JSON list of lists of token ids")
    parser.add_argument("counts", type=Path, help="npz to write")
    options = parser.parse_args()
    reference = HfReference(options.model)
    prompts = json.loads(options.prompts.read_text(encoding="utf-8"))
    np.savez_compressed(options.counts, counts=np.stack([reference.counts(ids)[0] for ids in prompts]))


if __name__ == "__main__":
    main()
