"""Writes tests/reference/peft/prefix/FAMILY-CASE/: prefixes as HF PEFT saves them, and what models of this directory
compute behind them.

Needs torch, transformers, peft and numpy, and neither Paddle nor llmsuite; made with torch 2.13, transformers 5.23 and
peft 0.21.2. Run it from anywhere; a second run writes the same values:

    python tests/reference/make_peft_prefix.py

`reference.npz` has logits [B, L, V] of the input ids of the model's own reference, and the gradient of their sum times
`direction` with respect to the prompt embeddings.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
CASES = ("llama/grouped_query", "llama/own_head_dim", "qwen/qwen3", "qwen_moe/qwen2", "ernie/tied", "gpt/tied")
TOKENS = 5


def main() -> None:
    for case in CASES:
        torch.manual_seed(0)
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        base = AutoModelForCausalLM.from_pretrained(HERE / case, dtype=torch.float32, **plain)
        model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)).eval()
        with np.load(HERE / case / "reference.npz") as stored:
            ids = torch.tensor(stored["input_ids"])
        embeddings = model.prompt_encoder["default"].embedding.weight
        logits = model(input_ids=ids).logits
        direction = torch.randn_like(logits)
        (logits * direction).sum().backward()
        target = HERE / "peft" / "prefix" / case.replace("/", "-")
        model.save_pretrained(target)
        (target / "README.md").unlink()
        config = json.loads((target / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = None
        (target / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
        found = {"logits": logits, "direction": direction, "gradient": embeddings.grad}
        np.savez(target / "reference.npz", **{name: value.detach().numpy() for name, value in found.items()})


if __name__ == "__main__":
    main()
