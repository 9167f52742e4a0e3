"""The notebooks in docs/notebooks: their code, one cell after the other in one program, in few steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FEWER = {"STEPS": 4, "FEW": 2, "UPDATES": 2}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_without_outputs(path: Path) -> None:
    """https://nbformat.readthedocs.io/en/latest/format_description.html"""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        more = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        known = {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": cell["source"]}
        assert cell == known | more
        for target in re.findall(r"\]\(([^)#:]+)", "".join(cell["source"])) if not more else ():
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run(path: Path, tmp_path: Path, runner: Runner) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    *lines, last = cells[-1].splitlines()
    program = "\n".join([*cells[:-1], *lines, f"shown = {last}"])
    for name, steps in FEWER.items():
        program = re.sub(rf"^{name} = \d+$", f"{name} = {steps}", program, flags=re.MULTILINE)
    program += "\nopen('shown.json', 'w').write(json.dumps(shown))\n"
    for name in ("recipes", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "cells.py").write_text(program)
    environment = {**runner.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "cells.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown
    runs = {run.name for run in (tmp_path / "runs").iterdir()}
    assert runs == set(re.findall(r"runs/(notebook-\w+)", program))
