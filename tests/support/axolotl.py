"""Files of Axolotl."""

from __future__ import annotations

from typing import Any

ROWS = {"path": "org/rows", "type": "chat_template"}
BARE: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B-Instruct", "datasets": [ROWS], "adapter": "lora", "lora_r": 8,
    "lora_alpha": 16, "lora_target_linear": True, "learning_rate": "2e-5", "warmup_steps": 10, "bf16": "auto",
}  # fmt: skip
FULL = {key: value for key, value in BARE.items() if not key.startswith(("lora", "adapter"))}
