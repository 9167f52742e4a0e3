"""The Python API as docs/guide/python.md has it: its examples, one after the other in one program. And the one for
those who come from TRL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT

BLOCKS, OF_TRL = (
    re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / page).read_text(encoding="utf-8"), re.DOTALL)
    for page in ("python.md", "from-trl.md")
)
NOTE = "noted.append([r['loss'] for r in run.metrics if 'loss' in r])\n"


def _said(directory: Path, runner: Runner) -> str:
    """What program.py of a directory prints, beside the data and recipes that come with llmsuite."""
    for name in ("recipes", "data"):
        (directory / name).symlink_to(ROOT / name)
    environment = {**runner.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> tuple[str, list[list[float]]]:
    """What the examples print, and the losses of each run."""
    directory = tmp_path_factory.mktemp("python")
    program = ["noted = []\n"]
    for block in BLOCKS:
        if block.startswith("# squared_relu.py"):
            (directory / "squared_relu.py").write_text(block)
            continue
        program += [block, NOTE if "llmsuite.train(" in block else ""]
    program.append("open('noted.json', 'w').write(__import__('json').dumps(noted))\n")
    (directory / "program.py").write_text("".join(program))
    said = _said(directory, runner)
    noted: list[list[float]] = json.loads((directory / "noted.json").read_text())
    return said, noted


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


def test_the_example_for_users_of_trl(tmp_path: Path, runner: Runner) -> None:
    (block,) = OF_TRL
    (tmp_path / "program.py").write_text(block)
    *before, loss = _said(tmp_path, runner).splitlines()
    assert "step 8/8" in "\n".join(before), "the number of steps that the page tells"
    assert 0 < float(loss) < 0.69, "less than at the beginning, where it is log 2"
