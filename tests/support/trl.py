"""Files of TRL."""

from __future__ import annotations

from typing import Any

BARE: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "org/rows"}
SFT: dict[str, Any] = {**BARE, "assistant_only_loss": True}
ADAPTERS = {**SFT, "use_peft": True}
