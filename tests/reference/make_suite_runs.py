"""Writes tests/reference/conversions/llamafactory.json: the losses of a run of LLaMA-Factory's own command.

    python -m tests.reference.make_suite_runs

with a Python that has llamafactory and its dependencies (torchaudio may be an empty module). On the CPU, in float32. A
step takes all rows, so that no order of them matters. The files of the other suites are the same job; nobody has run
them: see `loss_by_hand.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reference.tiny_llama_files import write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
CONVERSIONS = Path(__file__).resolve().parent / "conversions"
STEPS = 8
COUNT = 16
MODEL = "tiny/Llama-3-8B-Instruct"
"""A name by which ms-swift takes a model for Llama 3."""
_TRAINER: dict[str, Any] = {
    "output_dir": "out", "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
    "learning_rate": 0.002, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1, "bf16": False,
    "fp16": False, "logging_steps": 1, "save_steps": STEPS, "report_to": "none", "use_cpu": True,
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "llamafactory": {
        **_TRAINER, "model_name_or_path": MODEL, "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "rows", "dataset_dir": "rows", "template": "llama3", "cutoff_len": 256,
    },
    "swift": {
        **_TRAINER, "model": MODEL, "tuner_type": "full", "dataset": ["rows/train.jsonl"], "max_length": 256,
        "torch_dtype": "float32", "split_dataset_ratio": 0, "save_strategy": "steps",
    },
    "megatron": {
        "command": "megatron sft", "model": MODEL, "dataset": ["rows/train.jsonl"], "max_length": 256,
        "torch_dtype": "float32", "bf16": False, "fp16": False, "micro_batch_size": 2, "global_batch_size": COUNT,
        "train_iters": STEPS, "lr": 0.002, "lr_warmup_iters": 3, "weight_decay": 0.1, "adam_beta2": 0.999,
        "logging_steps": 1, "save_steps": STEPS, "report_to": "none", "output_dir": "out",
    },
    "axolotl": {
        "base_model": MODEL, "datasets": [{"path": "rows/train.jsonl", "ds_type": "json", "type": "chat_template"}],
        "chat_template": "llama3", "sequence_len": 256, "micro_batch_size": 2, "gradient_accumulation_steps": 8,
        "max_steps": STEPS, "learning_rate": 0.002, "optimizer": "adamw_torch", "lr_scheduler": "cosine",
        "warmup_steps": 3, "weight_decay": 0.1, "bf16": False, "fp16": False, "logging_steps": 1, "save_steps": STEPS,
        "output_dir": "out",
    },
    "paddleformers": {
        "model_name_or_path": MODEL, "stage": "SFT", "fine_tuning": "full", "do_train": True,
        "train_dataset_path": "rows/train.jsonl", "train_dataset_type": "messages", "template": "llama3",
        "template_backend": "custom", "max_seq_len": 256, "compute_type": "float32", "device": "cpu",
        "per_device_train_batch_size": COUNT, "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "learning_rate": 0.002, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1,
        "logging_steps": 1, "save_steps": STEPS, "output_dir": "out",
    },
}  # fmt: skip
"""What the command takes; places are below the directory in which it runs. "megatron" is a command of ms-swift."""


def write_inputs(directory: Path) -> None:
    """The model and the rows that all the files name."""
    write_model(directory / MODEL, ROOT / "data" / "tokenizer", like_llama3=True)
    write_rows(directory / "rows", ROOT / "data" / "sft" / "train.jsonl", COUNT)
    tags = {"role_tag": "role", "content_tag": "content"} | {
        f"{role}_tag": role for role in ("user", "assistant", "system")
    }
    entry = {"file_name": "train.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (directory / "rows" / "dataset_info.json").write_text(json.dumps({"rows": entry}), encoding="utf-8")


def losses(scratch: Path) -> list[float]:
    """The loss of each step, as the command logs it."""
    write_inputs(scratch)
    (scratch / "job.yaml").write_text(json.dumps(FILES["llamafactory"]), encoding="utf-8")  # which is YAML too
    words = [sys.executable, "-c", "from llamafactory.train.tuner import run_exp; run_exp()", "job.yaml"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DISABLE_VERSION_CHECK": "1"}
    subprocess.run(words, cwd=scratch, check=True, env=environment)
    state = json.loads((scratch / f"out/checkpoint-{STEPS}/trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def main() -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "llamafactory")}
    with tempfile.TemporaryDirectory() as scratch:
        found = {"versions": versions, "arguments": FILES["llamafactory"], "losses": losses(Path(scratch))}
    (CONVERSIONS / "llamafactory.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
