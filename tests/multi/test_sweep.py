"""A sweep: its runs, the table at its end, and what it does when it is called again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.multi.conftest import Runner

_KILLED = """
import os, signal
import llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    if run.recipe["seed"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


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
    # the names say the swept values alone: another fixed value is noticed by the recipe
    refused = runner.run(*swept, "--train.weight_decay=0.5", expect=2)
    assert f"{root}/learning_rate=1e-4 has a run that differs in train.weight_decay; give this sweep" in refused


def test_a_run_that_is_killed_does_not_end_the_others(runner: Runner) -> None:
    root = runner.directory / "seeds"
    plugin = runner.directory / "killed.py"
    plugin.write_text(_KILLED)
    words = ["--smoke", "--launch.num_devices=1", "--parallel={}", "--train.max_steps=1", f"--output_dir={root}"]
    swept = ["sweep", "recipes/llama/sft.json", "--plugin", str(plugin), *words, "--seed=1,2"]
    output = runner.run(*swept, expect=137)
    assert f"seed=1: was killed by SIGKILL; its log: {root / 'seed=1.log'}\n" in output
    assert "seed=2: ended\n" in output
