"""Scripts with Paddle's own auto-parallel, started by Paddle's own launcher, on CPU processes: one import is added."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.paths import ROOT

LIMIT = 1e-6
NUM_RANKS = 8
CASES = ["dp", "dp, stage 1", "dp, stage 2", "dp, stage 3", "tp", "pp", "3d"]


def launch(script: Path, *words: str, logs: Path) -> list[str]:
    """Run a script in eight ranks; returns what each of them printed."""
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(NUM_RANKS)]
    command = [*launcher, "--log_dir", str(logs), str(script), *words]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.run(command, cwd=logs.parent, env=environment, capture_output=True, text=True, timeout=600)
    printed = [(logs / f"workerlog.{rank}").read_text(encoding="utf-8") for rank in range(NUM_RANKS)]
    assert process.returncode == 0, "\n".join([process.stderr[-2000:], *(text[-2000:] for text in printed)])
    return printed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What each rank of the script has found, and the directory it wrote into."""
    directory = tmp_path_factory.mktemp("script")
    launch(ROOT / "tests" / "multi" / "paddle_script.py", str(directory), logs=directory / "logs")
    return directory, [json.loads((directory / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("mode", ["op by op", "program"])
@pytest.mark.parametrize("case", CASES)
def test_a_script_has_the_losses_of_one_process(found: tuple[Path, list[dict[str, Any]]], case: str, mode: str) -> None:
    """With SGD, and with AdamW where sharding cuts its state. Ranks have the losses of their rows, all rows alike."""
    ranks = found[1]
    wanted = ranks[0]["one by adamw" if "stage" in case else "one"][0]
    losses = [rank[case][mode == "program"] for rank in ranks]
    there = [of_rank for of_rank in losses if of_rank[0] is not None]
    assert len(there) == (4 if case in ("pp", "3d") else 8), "the last mesh has losses"
    np.testing.assert_allclose(np.mean(there, axis=0), wanted, rtol=LIMIT)
    assert wanted[2] < wanted[1] < wanted[0], "it is trained"


def test_parts_lie_where_meshes_say(found: tuple[Path, list[dict[str, Any]]]) -> None:
    ranks = found[1]
    assert [rank["placed"] for rank in ranks] == [
        [[7], [10]], [[8], [11]], [[1], [4]], [[9], [12]], [[2], [5]], [[3], [6]], None, None
    ]  # fmt: skip
    assert [rank["moved"] for rank in ranks] == [None, None, [[1, 2, 3]], [[4, 5, 6]], *[None] * 4]


def test_what_one_mesh_saves_another_one_loads(found: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, ranks = found
    wanted = np.load(directory / "SGD.npz")
    for rank in ranks:
        for name in ("w0", "w1"):
            np.testing.assert_allclose(rank["loaded"][name], wanted[name], rtol=0, atol=LIMIT, err_msg=name)


@pytest.mark.parametrize("words", [(), ("--to_static",)])
def test_the_script_of_the_guide_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Four ranks of the last mesh print losses of their rows, which fall."""
    text = (ROOT / "docs" / "guide" / "paddle-scripts.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(# train_mlp.py\n.*?)```", text, re.DOTALL)
    (tmp_path / "train_mlp.py").write_text(script, encoding="utf-8")
    printed = launch(tmp_path / "train_mlp.py", *words, logs=tmp_path / "log")
    losses = [[float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.M)] for text in printed]
    assert [len(of_rank) for of_rank in losses] == [0] * 4 + [10] * 4
    assert all(of_rank[-1] < 0.7 * of_rank[0] for of_rank in losses[4:])
