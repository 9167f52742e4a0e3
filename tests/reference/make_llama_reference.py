"""Writes tests/reference/llama/: tiny Llama models as HF transformers saves them, and the logits it gets from them.

Needs torch, transformers, numpy and safetensors, and neither Paddle nor llmsuite; made with torch 2.13 and
transformers 5.23. Run it from anywhere; a second run writes the same values:

    python tests/reference/make_llama_reference.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TARGET = Path(__file__).resolve().parent / "llama"

CASES: dict[str, dict[str, Any]] = {
    "grouped_query": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "tied_one_kv_head": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    # of its 8 rotary pairs one keeps its frequency, one is interpolated and six are stretched; 56 positions are
    # more than the original 40
    "llama3_rope": {
        "hidden_size": 32,
        "intermediate_size": 28,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 320,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40,
        },
    },
    "own_head_dim": {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "rms_norm_eps": 1e-6,
    },
}
SHAPES = {"llama3_rope": (1, 56)}
"""Rows and length of the input, where they are not (2, 12)."""


def fill(model: LlamaForCausalLM, rng: np.random.Generator) -> None:
    """Values large enough that logits are of order 1 and every term of the model shows in them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype("float32"))
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)


def make(name: str, shape: dict[str, Any], seed: int) -> None:
    """One directory: config.json and model.safetensors by save_pretrained, and reference.npz."""
    rng = np.random.default_rng(seed)
    common = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config = LlamaConfig(**{**common, **shape})
    model = LlamaForCausalLM(config).eval()
    fill(model, rng)
    directory = TARGET / name
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    input_ids = rng.integers(0, config.vocab_size, SHAPES.get(name, (2, 12)))
    with torch.no_grad():
        logits = model.double()(torch.from_numpy(input_ids)).logits
    np.savez(directory / "reference.npz", input_ids=input_ids, logits=logits.numpy().astype("float32"))
    sizes = ", ".join(f"{path.name} {path.stat().st_size}" for path in sorted(directory.iterdir()))
    print(f"{name}: {sizes}; logits within {logits.abs().max():.2f}")


if __name__ == "__main__":
    for number, (case, keys) in enumerate(CASES.items()):
        make(case, keys, seed=number)
