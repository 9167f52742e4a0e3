"""The commands of docs/guide/plugin-examples.md and stages.md, run as they stand, and the contract of the stage."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

TEXT = "\n".join((ROOT / "docs" / "guide" / f"{name}.md").read_text("utf-8") for name in ("plugin-examples", "stages"))
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```\n(.*?)```", re.sub(r"```\w+\n.*?```\n", "", TEXT, flags=re.DOTALL), re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


class Guide:
    """A directory with the files of the pages, in which their commands run."""

    def __init__(self, directory: Path, runner: Runner):
        self.directory = directory
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**runner.environment, "PYTHONPATH": path}
        for name in ("recipes", "data"):
            (directory / name).symlink_to(ROOT / name)
        for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, re.DOTALL):
            (directory / name).write_text(code)
        for name, key in ("ages.jsonl", '"table"'), ("student.json", '"distil"'):
            (text,) = (block for block in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL) if key in block)
            (directory / name).write_text(text)

    def run(self, words: list[str]) -> None:
        assert words[0] == "llmsuite"
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def metrics(self, run: str) -> list[dict[str, Any]]:
        lines = (self.directory / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [record for line in lines if "loss" in (record := json.loads(line))]


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Guide:
    """After all commands of the pages."""
    made = Guide(tmp_path_factory.mktemp("guide"), runner)
    assert len(COMMANDS) == 5
    for words in COMMANDS:
        made.run(words)
    return made


def test_the_student_comes_nearer_to_its_teacher(guide: Guide) -> None:
    records = guide.metrics("student")
    assert records[-1]["distil/kl"] < records[0]["distil/kl"]
    assert records[-1]["distil/nll"] < records[0]["distil/nll"]
    assert records[0]["loss"] == pytest.approx((records[0]["distil/kl"] + records[0]["distil/nll"]) / 2, rel=1e-6)


def test_tensor_parallel_ranks_distil_as_one_process(guide: Guide) -> None:
    """The teacher is whole on each of them, the student is not."""
    words = next(words for words in COMMANDS if "student.json" in words)
    two = ["--launch.num_devices=2", '--parallel={"tensor_parallel_degree": 2}', "--train.max_steps=2"]
    guide.run([*words[:-1], *two, "--output_dir=runs/of-two"])
    for one, other in zip(guide.metrics("student"), guide.metrics("of-two")):
        for key in ("distil/kl", "distil/nll"):
            assert one[key] == pytest.approx(other[key], rel=1e-5 if one["step"] > 1 else 1e-6)


def test_the_stage_keeps_the_contract(guide: Guide, tmp_path: Path) -> None:
    site = PluginSite(tmp_path)
    site.install("distil", (guide.directory / "distil.py").read_text())
    teacher = json.dumps(str(guide.directory / "runs" / "teacher"))
    program = f"""
from pathlib import Path
from llmsuite.testing import assert_stage_contract
assert_stage_contract("distil", Path({json.dumps(str(tmp_path / "runs"))}), {{"distil.teacher": {teacher}}})
"""
    (tmp_path / "runs").mkdir()
    path = os.pathsep.join([str(tmp_path), guide.environment["PYTHONPATH"]])
    environment = {**guide.environment, "PYTHONPATH": path, "LLMSUITE_PLUGINS": "distil"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_votes_are_rewards(guide: Guide) -> None:
    records = guide.metrics("voted")
    assert any(0 < record.get("rewards/majority", 0) <= 1 for record in records)
    assert all(record["rewards/majority"] >= 0.25 for record in records if "rewards/majority" in record)
    assert all(0 < record["rewards/majority/agreement"] <= 1 for record in records if "rewards/majority" in record)


def test_episodes_are_played(guide: Guide) -> None:
    lines = (guide.directory / "runs" / "looked-up" / "completions.jsonl").read_text().splitlines()
    assert lines
    assert all(json.loads(line)["turns"][0]["role"] == "assistant" for line in lines)
    assert all("rewards/environment/calls" in record for record in guide.metrics("looked-up"))


def test_the_logger_has_the_metrics(guide: Guide) -> None:
    with open(guide.directory / "runs" / "logged" / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    losses = [float(value) for _, name, value in rows if name == "loss"]
    assert losses == [record["loss"] for record in guide.metrics("logged")]
