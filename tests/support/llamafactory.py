"""Files of LLaMA-Factory."""

from __future__ import annotations

from typing import Any

SFT: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-8B", "trust_remote_code": True, "stage": "sft", "do_train": True,
    "finetuning_type": "lora", "lora_rank": 16, "lora_target": "all", "dataset": "mine", "template": "qwen3_nothink",
    "cutoff_len": 1024, "preprocessing_num_workers": 4, "dataloader_num_workers": 2, "output_dir": "saves/x",
    "logging_steps": 5, "save_steps": 50, "plot_loss": True, "report_to": "none", "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4, "learning_rate": 2e-4, "num_train_epochs": 2.0, "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1, "bf16": True, "ddp_timeout": 9000, "resume_from_checkpoint": None,
}  # fmt: skip
FULL = {**{key: value for key, value in SFT.items() if not key.startswith("lora_")}, "finetuning_type": "full"}
DPO = {**SFT, "stage": "dpo", "pref_beta": 0.2, "pref_loss": "sigmoid"}


ACTION = "from-llamafactory"
