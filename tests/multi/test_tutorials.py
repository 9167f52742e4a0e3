"""Commands, programs and outputs of docs/guide/tutorial-*.md, run as they stand. Runs of the digits take two steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multi.conftest import Runner
from tests.support.paths import ROOT

GUIDE = ROOT / "docs" / "guide"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Walk:
    """A tutorial, followed in a directory with the data and the recipes that come with llmsuite.

    Args:
        name: of the page, without `tutorial-`.
        directory: an empty one.
        steps: `train.max_steps` of the runs; None for as many as their recipe has.
    """

    def __init__(self, name: str, directory: Path, runner: Runner, steps: int | None = None):
        self.directory = directory
        self.blocks = BLOCK.findall((GUIDE / f"tutorial-{name}.md").read_text(encoding="utf-8"))
        self._steps = [] if steps is None else [f"--train.max_steps={steps}"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self._environment = {**runner.environment, "PYTHONPATH": path}
        for place in ("recipes", "data", "examples"):
            (directory / place).symlink_to(ROOT / place)
        for language, text in self.blocks:
            if (first := re.match(r"# (\w+\.(?:py|sh))\n", text)) and language in ("python", "bash"):
                (directory / first[1]).write_text(text, encoding="utf-8")

    def block(self, word: str, language: str) -> str:
        """The one block of a language with a word."""
        (found,) = (text for of, text in self.blocks if of == language and word in text)
        return str(found)

    def follow(self) -> str:
        """What the commands of the page print, all of them together."""
        lines = [
            line for language, text in self.blocks if not language for line in text.replace("\\\n", " ").splitlines()
        ]
        return "".join(self.run(shlex.split(line)) for line in lines)

    def run(self, words: list[str], expect: int = 0) -> str:
        program, *rest = words
        assert program in ("llmsuite", "python")
        command = [sys.executable, "-m", "llmsuite", *rest] if program == "llmsuite" else [sys.executable, *rest]
        if self._steps and words[:2] == ["llmsuite", "run"]:
            command = [word for word in command if not word.startswith("--train.max_steps=")] + self._steps
        done = subprocess.run(
            command, cwd=self.directory, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == expect, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def test_one_device(runner: Runner, tmp_path: Path) -> None:
    walk = Walk("one-device", tmp_path, runner, steps=2)
    said = walk.follow()
    for line in walk.block("greedy tokens", "text").splitlines():
        assert re.sub(r"\S+e-\d+", "…", line) in re.sub(r"\S+e-\d+", "…", said)
    assert "llmsuite" not in walk.block("create_predictor", "python")
    assert (tmp_path / "models" / "digits" / "config.json").is_file()


def test_a_paddlenlp_script(runner: Runner, tmp_path: Path) -> None:
    walk = Walk("paddlenlp", tmp_path, runner)
    (tmp_path / "rows").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "rows" / f"{name}.json").write_text(walk.block('"src"', "json"), encoding="utf-8")
    said = walk.follow()
    assert (tmp_path / "sft.json").read_text(encoding="utf-8") == walk.block('"stage"', "json")
    for word in ("wrote sft.json", "sft.json: ok"):
        for line in walk.block(word, "text").splitlines():
            assert line in said
    assert "mesh pp1 dp1 sharding1 tp4 on cpu" in said
    script = tmp_path / "run_sft.sh"
    script.write_text(script.read_text().rstrip() + " --lora_dropout_seed 3\n", encoding="utf-8")
    refused = walk.run(["llmsuite", "recipe", "from-paddlenlp", "run_sft.sh", "-o", "other.json"], expect=2)
    assert walk.block("no recipe is this job", "text").strip() in refused


def test_a_reward(runner: Runner, tmp_path: Path) -> None:
    walk = Walk("grpo", tmp_path, runner, steps=2)
    said = walk.follow()
    assert "rewards are right" in said
    assert "rewards/same_length" in (tmp_path / "runs" / "my-grpo" / "metrics.jsonl").read_text()
    wrong = walk.run(
        ["llmsuite", "validate", "recipes/llama/digits-grpo.json", '--reward.functions={"rewards.py:rigt": 1}'], 2
    )
    assert walk.block("rigt", "text").strip() in wrong


def test_a_stage(runner: Runner, tmp_path: Path) -> None:
    walk = Walk("stage", tmp_path, runner)
    (tmp_path / "focal.json").write_text(walk.block('"stage"', "json"), encoding="utf-8")
    said = walk.follow()
    assert "supervised fine-tuning with a focal loss" in said
    table = said[said.index("runs/focal-1  runs/focal-2") :].splitlines()
    compared = {cells[0]: cells[1:] for cells in (line.split() for line in table) if len(cells) == 3}
    for name in ("loss", "eval/loss", "grad_norm"):
        one, two = (float(cell) for cell in compared[name])
        assert one == pytest.approx(two, rel=1e-5)
    wrong = walk.run(["llmsuite", "validate", "focal.json", "--plugin", "focal.py", "--focal.gama=1"], expect=2)
    assert walk.block("gama", "text").strip() in wrong
