"""Files of ms-swift."""

from __future__ import annotations

from typing import Any

BARE: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B-Instruct", "dataset": "rows.jsonl", "max_length": 2048}
RLHF = {**BARE, "command": "swift rlhf", "rlhf_type": "dpo"}
FULL = {**BARE, "tuner_type": "full", "deepspeed": "zero2"}
MEGATRON = {**BARE, "command": "megatron sft", "num_train_epochs": 2}
MEGATRON_DPO = {**MEGATRON, "command": "megatron rlhf", "rlhf_type": "dpo"}
