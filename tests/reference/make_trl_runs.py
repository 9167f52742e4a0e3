"""Writes tests/reference/conversions/trl.json: the losses of runs of TRL's own scripts, by their configuration files.

    python -m tests.reference.make_trl_runs

with a Python that has trl; `benchmarks.peers.venvs.python_of("torch")` names one. On the CPU, in float32.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reference.tiny_llama_files import write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(__file__).resolve().parent / "conversions" / "trl.json"
STEPS = 8
COMMON: dict[str, Any] = {
    "model_name_or_path": "tiny-llama", "dataset_name": "rows", "output_dir": "out", "max_steps": STEPS,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.002,
    "train_sampling_strategy": "sequential", "use_cpu": True, "bf16": False, "logging_steps": 1,
    "save_strategy": "steps", "save_steps": STEPS, "report_to": "none", "max_length": 256,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "sft": {**COMMON, "assistant_only_loss": True, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "dpo": {**COMMON, "beta": 0.2, "weight_decay": 0.1},
}
ROWS = {"sft": "data/sft/train.jsonl", "dpo": "data/preference/train.jsonl"}
COUNT = 4 * STEPS


def losses(command: str, arguments: dict[str, Any], scratch: Path) -> list[float]:
    """The loss of each step, as the script logs it."""
    write_model(scratch / "tiny-llama", ROOT / "data/tokenizer")
    write_rows(scratch / "rows", ROOT / ROWS[command], COUNT)
    (scratch / f"{command}.yaml").write_text(json.dumps(arguments))  # which is YAML too
    words = [sys.executable, "-m", f"trl.scripts.{command}", "--config", f"{command}.yaml"]
    subprocess.run(words, cwd=scratch, check=True)
    state = json.loads((scratch / f"out/checkpoint-{STEPS}/trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def main() -> None:
    found: dict[str, Any] = {"versions": {name: importlib.metadata.version(name) for name in ("torch", "trl")}}
    for command, arguments in JOBS.items():
        with tempfile.TemporaryDirectory() as scratch:
            found[command] = {"arguments": arguments, "losses": losses(command, arguments, Path(scratch))}
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
