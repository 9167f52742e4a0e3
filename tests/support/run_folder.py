"""Directories as runs leave them, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.observe.generations import write_generations


def record(step: int, loss: float, **more: Any) -> dict[str, Any]:
    """Metrics of a training step."""
    rates = {"avg_batch_cost": 0.5, "avg_reader_cost": 0.01, "ips_total": 1000.0 + step, "peak_memory_bytes": 2.5e9}
    return {
        "schema": 1,
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3 / step,
        "grad_norm": 2 / step,
        **rates,
        **more,
    }


PIPELINE: dict[str, dict[str, Any]] = {
    "parallel": {"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved"},
    "launch": {"num_devices": 4, "nnodes": 1},
}
"""Sections of a run that has one."""


def make_run(
    directory: Path,
    num_steps: int = 5,
    end: str | None = "ended",
    num_ranks: int = 2,
    sections: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A run with an evaluation after its last step.

    Args:
        directory: made.
        num_steps: recorded.
        end: last event; None for a run that is running.
        num_ranks: of the run.
        sections: of the recipe, in addition to `train`.
        keys: of its section `train`.
    """
    directory.mkdir(parents=True)
    recipe = {"stage": "sft", **(sections or {}), "train": {"learning_rate": 1e-3, **keys}, "loggers": []}
    (directory / "recipe.json").write_text(json.dumps(recipe))
    lines = [record(step, 3 / step) for step in range(1, num_steps + 1)]
    lines.append({"schema": 1, "step": num_steps, "eval/loss": 0.75})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    busy = [{"step": s, "busy_seconds": [0.1 * (r + 1) for r in range(num_ranks)]} for s in range(1, num_steps + 1)]
    (directory / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in busy))
    events = [{"time": "2026-01-01T00:00:00.000+00:00", "event": "started", "step": 0}]
    events += [{"time": "2026-01-01T00:01:00.000+00:00", "event": end, "step": num_steps}] if end else []
    (directory / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (directory / "environment.json").write_text(json.dumps({"host": "<host>", "mesh": "pp1 dp2 sharding1 tp1"}))
    return directory


def make_preferences(directory: Path, num_steps: int, text: str = "It is **Paris**.") -> Path:
    """A DPO run with evaluations, their answers and a rollout: what has a chart of its own."""
    sections = {
        "stage": "dpo",
        "model": {"family": "llama", "preset": "smollm2-135m", "weights": "models/smollm2-135m-instruct"},
        "data": {"train": "data/preference/train.jsonl", "eval": "data/preference/eval.jsonl"},
        "lora": {"rank": 8, "method": "lora"},
    }
    run = make_run(directory, num_steps=1, sections=sections, max_steps=num_steps, global_batch_size=8)
    lines = []
    for step in range(1, num_steps + 1):
        pair = {"rewards/chosen": step / 100, "rewards/rejected": -step / 50, "rewards/margin": 3 * step / 100}
        logps = {"logps/chosen": -30.0 + step / 20, "logps/rejected": -80.0 - step / 10}
        lines.append(record(step, 0.69 * 0.99**step, **pair, **logps, **{"rewards/accuracy": 0.75}))
        if step % 50 == 0 or step == num_steps:
            lines.append({"step": step, "eval/loss": 0.68 * 0.99**step, "eval/rewards/accuracy": 0.875})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"step": 1, "group": 0, "prompt": "What is the capital of France?", "text": text, "reward": 1.0,
           "rewards": {"exact": 1.0}, "advantage": 0.5, "num_tokens": 6, "finish_reason": "stop"}  # fmt: skip
    rows = [{**row, "step": step} for step in (1, num_steps)]
    (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (1, num_steps):
        prompt = "user\n" + "What is the capital of France? " * 60
        write_generations(run, step, [{"prompt": prompt, "output": text, "tgt": "Paris."}] * 2)
    environment = {"host": "host", "mesh": "pp1 dp2 sharding1 tp1", "ranks": 2, "device": "cpu"}
    (run / "environment.json").write_text(json.dumps(environment))
    return run
