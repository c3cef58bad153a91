"""Independent reference of signatures: which experts Hugging Face's model picks for given tokens, in float32.

    python expert_counts.py MODEL PROMPTS.json COUNTS.npz

PROMPTS.json is a list of lists of token ids. COUNTS.npz gets `counts` uint32 [prompts, layers, experts], in the
order of the prompts, and `smallest_gap`: the least difference between the last router logit that was picked and
the first that was not, so that a reader sees how far from a tie every pick is. Prompts run one by one, without
padding, cache or batching.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def count_picks(model: torch.nn.Module, token_ids: list[int], top_k: int) -> tuple[np.ndarray, float]:
    """Counts [layers, experts] of one prompt, and the smallest gap between a picked and an unpicked expert."""
    output = model(torch.tensor([token_ids]), output_router_logits=True, use_cache=False)
    logits = torch.stack([layer.reshape(len(token_ids), -1) for layer in output.router_logits])
    best = logits.topk(top_k + 1, dim=-1)
    gap = (best.values[..., top_k - 1] - best.values[..., top_k]).min().item()
    experts = logits.shape[-1]
    picks = best.indices[..., :top_k].reshape(len(logits), -1).numpy()
    return np.stack([np.bincount(layer, minlength=experts) for layer in picks]), gap


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("prompts", type=Path, help="JSON list of lists of token ids")
    parser.add_argument("counts", type=Path, help="npz to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    top_k = model.config.num_experts_per_tok
    results = [count_picks(model, token_ids, top_k) for token_ids in json.loads(options.prompts.read_text())]
    counts = np.stack([counts for counts, _ in results]).astype(np.uint32)
    np.savez_compressed(options.counts, counts=counts, smallest_gap=min(gap for _, gap in results))


if __name__ == "__main__":
    main()
