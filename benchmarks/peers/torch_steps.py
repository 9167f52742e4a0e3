"""A peer: HF transformers' Trainer, or TRL's, on torch. Runs in a virtual environment of its own, see `venvs.py`.

python torch_steps.py TASK.json PEER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from reward import share
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from turns import TakeTurns


class Callback(TakeTurns, TrainerCallback):
    pass


class TokenWindows(torch.utils.data.Dataset):
    """Rows of tokens, each predicted from those before it; the last one is only a target."""

    def __init__(self, path: str):
        self._rows = np.load(path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        row = torch.from_numpy(self._rows[at])
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    peer = sys.argv[2]
    torch.set_num_threads(task["threads"])
    arguments: dict[str, Any] = {
        "output_dir": task["scratch"], "max_steps": task["steps"], "per_device_train_batch_size": task["batch"],
        "learning_rate": task["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optim": "adamw_torch",
        "train_sampling_strategy": "sequential", "logging_steps": 1, "logging_nan_inf_filter": False,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 0,
    }  # fmt: skip
    if peer != "trl-as-is":  # whose defaults both are
        arguments |= {"bf16": task["precision"] == "bf16", "gradient_checkpointing": False}
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32, **_stored(task["base_dtype"]))
    kind = task["kind"]
    common: dict[str, Any] = {"callbacks": [Callback()]}
    if kind == "pretrain":
        arguments["remove_unused_columns"] = False  # or `shift_labels` would go, and with it the last target
        Trainer(model, TrainingArguments(**arguments), train_dataset=TokenWindows(task["rows"]), **common).train()
        return
    common["train_dataset"] = Dataset.from_list(
        [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    )
    # by its file: the class that the directory names is a matter of whoever wrote it
    common["processing_class"] = PreTrainedTokenizerFast(
        tokenizer_file=f"{task['model']}/tokenizer.json", eos_token=task["eos"], pad_token=task["eos"]
    )
    arguments |= {"max_length": task["max_length"], "pad_to_multiple_of": None}
    if kind == "dpo":
        precompute = peer == "trl-precomputed"
        config = DPOConfig(**arguments, beta=task["beta"], precompute_ref_log_probs=precompute)
        DPOTrainer(model, args=config, **common).train()
        return
    common["peft_config"] = None
    if task["has_adapter"]:
        common["peft_config"] = LoraConfig(
            r=task["rank"], lora_alpha=task["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if kind == "grpo":
        GRPOTrainer(model, [of_texts], args=_grpo_config(task, arguments), **common).train()
    else:
        SFTTrainer(model, args=SFTConfig(**arguments), **common).train()


def _stored(base_dtype: str | None) -> dict[str, Any]:
    """Arguments for a model whose matrices are kept in 4 bits, as `lora.base_dtype` keeps them."""
    if base_dtype is None:
        return {}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=base_dtype)}


def of_texts(completions: list[str], **_: Any) -> list[float]:
    return [share(text) for text in completions]


def _grpo_config(task: dict[str, Any], arguments: dict[str, Any]) -> GRPOConfig:
    """The same prompts in the same order; a batch counts completions."""
    count = task["num_generations"]
    left_out = ("max_length", "pad_to_multiple_of", "train_sampling_strategy")
    arguments = {name: value for name, value in arguments.items() if name not in left_out}
    arguments |= {
        "per_device_train_batch_size": task["batch"] * count, "num_generations": count, "shuffle_dataset": False,
        "max_completion_length": task["max_completion_length"], "temperature": 1.0, "loss_type": "dapo", "beta": 0.0,
    }  # fmt: skip
    return GRPOConfig(**arguments)


if __name__ == "__main__":
    main()
