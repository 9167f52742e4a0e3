"""Budgets of training steps on a device, by `llmsuite rehearse` of a model of true width with few layers.

`budgets.json` is the table of what a step may take at most, `test_budgets.py` holds it. After a change that takes less,
or takes more on purpose, write it anew, and look at the difference:

    python -m tests.multi.budgets
    python -m tests.multi.budgets dp8 grpo  # these only
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

TABLE = Path(__file__).with_name("budgets.json")
MODEL = {
    "family": "llama",
    "preset": "llama-3.1-8b",
    "tokenizer": "data/tokenizer",
    "config": {"num_hidden_layers": 4},
}
EXPERTS = {
    "family": "qwen_moe",
    "preset": "qwen3-30b-a3b",
    "tokenizer": "data/tokenizer",
    "config": {"num_hidden_layers": 2},
}
_LOCATED = ("reads", "waits", "uploads")
"""Figures whose lines are known."""
_TOKENS = ("recipes/llama/pretrain.json", "--pretrain.split=700,299,1")


def case(
    recipe: Sequence[str], batch: int, num_devices: int, model: Mapping[str, Any] = MODEL, **parallel: Any
) -> list[str]:
    """Arguments of the command for one layout. A rank has two micro-batches or more, so that gradients are added up."""
    return [
        *recipe,
        f"--model={json.dumps(model)}",
        f"--train.global_batch_size={batch}",
        f"--launch.num_devices={num_devices}",
        f"--parallel={json.dumps(parallel)}",
        "--engine.recompute=none",
    ]


CASES = {
    "dp8": case(_TOKENS, 16, 8),
    "tp2": case(_TOKENS, 2, 2, tensor_parallel_degree=2, sequence_parallel=True),
    "pp2": case(_TOKENS, 4, 2, pipeline_parallel_degree=2, pipeline_schedule="1F1B"),
    "stage3": case(_TOKENS, 16, 8, sharding="stage3"),
    "dpo": case(["recipes/llama/dpo.json"], 2, 1),
    "lora": case(["recipes/llama/lora.json"], 2, 1),
    "qwen3 ep8": case(["recipes/qwen_moe/pretrain.json"], 16, 8, EXPERTS, expert_parallel_degree=8, sharding="stage1"),
    "grpo": case(["recipes/llama/grpo.json", "--rollout.num_generations=2"], 4, 1),
}


def taken(report: Mapping[str, Any]) -> dict[str, int]:
    """The figures of a rank's report that have a budget."""
    counted = ("reads", "waits", "uploads", "messages")
    found = {key: sum(row["count"] for row in report[key]) for key in counted}
    return {**found, "launches": report["launches"], "peak_bytes": report["peak_bytes"]}


def overdrawn(reports: Sequence[Mapping[str, Any]], budgets: Sequence[Mapping[str, int]]) -> list[str]:
    """Descriptions of what ranks take above their budgets, with the lines where they read and wait."""
    found = []
    for report, budget in zip(reports, budgets, strict=True):
        figures = taken(report)
        assert figures.keys() == budget.keys()
        for key, most in budget.items():
            # tables that the engine keeps from before the step count too
            allowed = most + most // 1000 if key == "peak_bytes" else most
            if figures[key] > allowed:
                line = f"rank {report['rank']}: {figures[key]} {key}, at most {most}"
                if key in _LOCATED:
                    line += ": " + ", ".join(f"{row['count']} at {row['place']}" for row in report[key])
                found.append(line)
    return found


def reports_in(printed: str) -> list[dict[str, Any]]:
    """The reports that the command prints with `--json`."""
    found: list[dict[str, Any]] = json.loads(printed[printed.index("[\n") :])
    return found


def main() -> None:
    """Write the table, or the lines of the cases that are named."""
    names = sys.argv[1:] or list(CASES)
    table = json.loads(TABLE.read_text()) if sys.argv[1:] else {}
    for name in names:
        words = CASES[name]
        command = [sys.executable, "-m", "llmsuite", "rehearse", *words, "--json"]
        printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        table[name] = [taken(report) for report in reports_in(printed)]
        print(f"{name}: {table[name]}", flush=True)
    table = {name: table[name] for name in CASES}
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
