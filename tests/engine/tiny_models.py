"""Tiny random mixture-of-experts models, one for each property of an architecture that capture must cope with.

A model is a folder as transformers saves it (configuration, safetensors, the testbed's tokenizer), the same one
for the same arguments. The weights are drawn wide enough that tokens differ in the experts they select.
"""

import shutil
from pathlib import Path
from typing import Any

TESTBED_MODEL = Path(__file__).resolve().parents[2] / "integration/testbed/model"

_COMMON: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_SPECIFIC: dict[str, dict[str, Any]] = {
    # Dense layers before and between the MoE layers.
    "qwen3_moe": {"mlp_only_layers": [0, 2], "norm_topk_prob": True},
    # A shared expert beside the routed ones, gate weights not normalised.
    "qwen2_moe": {"num_attention_heads": 2, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    # Sliding-window layers with a full-attention one among them, a dense first layer, shared experts, and
    # selection by biased sigmoid scores.
    "afmoe": {
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "sliding_window": 64,
        "global_attn_every_n_layers": 3,
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
}


def tiny_model(
    folder: Path, architecture: str, seed: int = 0, favourite: int | None = None, **settings: Any
) -> Path:
    """Saves the model in `folder` and returns it. `settings` replace those of the configuration.

    favourite: an expert that every token selects, where selection is biased.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **{**_COMMON, **_SPECIFIC[architecture], **settings})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Some architectures start their routers at zero, which selects the same experts always.
            if name.endswith(("expert_bias", "router.gate.weight")):
                torch.nn.init.normal_(parameter, std=0.15)
            if name.endswith("expert_bias") and favourite is not None:
                parameter.data[favourite] = 10.0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTBED_MODEL / name, folder)
    return folder
