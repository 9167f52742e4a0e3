"""The Python API as docs/guide/python.md has it: its examples, one after the other in one program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NOTE = "noted.append([r['loss'] for r in run.metrics if 'loss' in r])\n"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> tuple[str, list[list[float]]]:
    """What the examples print, and the losses of each run."""
    directory = tmp_path_factory.mktemp("python")
    for name in ("recipes", "data"):
        (directory / name).symlink_to(ROOT / name)
    program = ["noted = []\n"]
    for block in BLOCKS:
        if block.startswith("# squared_relu.py"):
            (directory / "squared_relu.py").write_text(block)
            continue
        program += [block, NOTE if "llmsuite.train(" in block else ""]
    program.append("open('noted.json', 'w').write(__import__('json').dumps(noted))\n")
    (directory / "program.py").write_text("".join(program))
    environment = {**runner.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    noted: list[list[float]] = json.loads((directory / "noted.json").read_text())
    return done.stdout, noted


def test_the_examples_say_what_they_should(outcome: tuple[str, Any]) -> None:
    said, _ = outcome
    assert "4 runs/llama-sft-smoke/checkpoints/step-4\n" in said
    assert "\n0.2 100 2\n" in said
    assert "unknown key; did you mean 'learning_rate'?\n" in said
    assert "step 2/2" in said, "what the ranks print"


def test_each_run_has_its_metrics(outcome: tuple[str, Any]) -> None:
    _, noted = outcome
    assert [len(losses) for losses in noted] == [4, 2, 2, 2]
    assert noted[1] == pytest.approx(noted[0][:2], rel=1e-6), "SFT on two ranks and on one"


def test_a_network_of_ones_own_is_the_same_on_any_mesh(outcome: tuple[str, Any]) -> None:
    _, noted = outcome
    assert noted[2] == pytest.approx(noted[3], rel=1e-6)
    assert noted[2][0] > 0
