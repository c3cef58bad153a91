"""Expert counts of token sequences by Hugging Face transformers in float32, independent of vLLM and eldr.

As a program: reads JSON lines {"id", "token_ids", "prompt_tokens"} from stdin and writes an npz with `ids`,
`prefill_counts` and `decode_counts`, int64 [requests, layers, experts].

    python -m integration.reference.hf_counts MODEL OUT.npz < requests.jsonl
"""

import argparse
import json
import sys
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
        out = self._model(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
        logits = torch.stack([layer.reshape(len(token_ids), self.experts) for layer in out.router_logits], 1)
        return torch.softmax(logits.float(), -1).topk(self.top_k, -1).indices.numpy()

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    requests = [json.loads(line) for line in sys.stdin]
    reference = HfReference(arguments.model)
    counted = [reference.counts(r["token_ids"], r["prompt_tokens"]) for r in requests]
    np.savez_compressed(
        arguments.out,
        ids=np.array([r["id"] for r in requests]),
        prefill_counts=np.stack([prefill for prefill, _ in counted]),
        decode_counts=np.stack([decode for _, decode in counted]),
    )


if __name__ == "__main__":
    main()
