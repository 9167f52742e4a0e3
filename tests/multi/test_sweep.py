"""A sweep: its runs, the table at its end, and what it does when it is called again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.multi.conftest import Runner


def test_a_sweep_runs_each_combination_once(runner: Runner) -> None:
    root: Path = runner.directory / "swept"
    words = ["--smoke", "--launch.num_devices=1", "--parallel={}", "--train.max_steps=2", f"--output_dir={root}"]
    swept = ["sweep", "recipes/llama/sft.json", *words, "--train.learning_rate=1e-4,1e-2"]
    output = runner.run(*swept)
    for name in ("learning_rate=1e-4", "learning_rate=1e-2"):
        recipe = json.loads((root / name / "recipe.json").read_text())
        assert recipe["train"]["learning_rate"] == float(name.partition("=")[2])
        assert (root / f"{name}.log").stat().st_size
    rows = [line.split() for line in output.splitlines() if line.startswith(f"{root}/")]
    assert sorted(row[1] for row in rows) == ["0.0001", "0.01"]
    losses = [float(row[-1]) for row in rows]
    assert losses == sorted(losses), "the least loss comes first"
    assert runner.run(*swept).count("has ended already") == 2
