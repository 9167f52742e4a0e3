"""Writes tests/reference/conversions/swift.json: the losses of runs of ms-swift's own commands.

    python -m tests.reference.make_swift_runs

with a Python that has ms-swift at the commit of docs/guide/from-other-suites.md and its dependencies, such as trl below
1. On the CPU, in float32. A step takes all rows, so that no order of them matters.
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
TARGET = Path(__file__).resolve().parent / "conversions" / "swift.json"
MODEL = "tiny/Meta-Llama-3-8B-Instruct"
"""A name by which ms-swift takes a model for Llama 3."""
COUNT = 16
STEPS = 4
_COMMON: dict[str, Any] = {
    "model": MODEL, "tuner_type": "full", "torch_dtype": "float32", "max_length": 256, "split_dataset_ratio": 0,
    "output_dir": "out", "max_steps": STEPS, "learning_rate": 0.002, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    "weight_decay": 0.1, "bf16": False, "fp16": False, "logging_steps": 1, "save_strategy": "steps",
    "save_steps": STEPS, "report_to": "none", "use_cpu": True,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "sft": {
        **_COMMON, "command": "swift sft", "dataset": ["sft.jsonl"], "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
    },
    "dpo": {
        **_COMMON, "command": "swift rlhf", "rlhf_type": "dpo", "dataset": ["pairs.jsonl"], "beta": 0.2,
        "rpo_alpha": 0.5, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16,
    },
}  # fmt: skip
"""The second one has one pair in a micro-batch, so that the term on chosen answers does not depend on their order."""


def write_inputs(directory: Path) -> None:
    """Write the model and the rows that all the jobs name."""
    write_model(directory / MODEL, ROOT / "data" / "tokenizer", like_llama3=True)
    write_rows(directory / "rows", ROOT / "data" / "sft" / "train.jsonl", COUNT)
    (directory / "rows" / "train.jsonl").rename(directory / "sft.jsonl")
    lines = (ROOT / "data" / "preference" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:COUNT]
    pairs = [pair(json.loads(line)) for line in lines]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")


def pair(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `{"prompt", "chosen", "rejected"}` in the form of ms-swift's pairs."""
    return {"messages": [*row["prompt"], *row["chosen"]], "rejected_response": row["rejected"][0]["content"]}


def losses(job: dict[str, Any], scratch: Path) -> list[float]:
    """Return the loss of each step, as the command logs it."""
    write_inputs(scratch)
    words = [sys.executable, "-m", f"swift.cli.{job['command'].split()[1]}"]
    for key, value in job.items():
        if key != "command":
            texts = value if isinstance(value, list) else [value]
            words += [f"--{key}", *(str(text).lower() if isinstance(text, bool) else str(text) for text in texts)]
    subprocess.run(words, cwd=scratch, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    (found,) = (scratch / "out").glob(f"*/checkpoint-{STEPS}/trainer_state.json")
    state = json.loads(found.read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def main() -> None:
    names = ("torch", "transformers", "trl")
    found: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in names}}
    for name, job in JOBS.items():
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = {"arguments": job, "losses": losses(job, Path(scratch))}
    TARGET.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
