"""A run that has ended goes on with more steps, and is then the run that had them from the start."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from llmsuite.base.files import sha256_of
from tests.multi.conftest import Runner

COMMON = ("--launch.num_devices=1", "--parallel={}", "--engine.recompute=none", "--train.warmup_ratio=0")
CONSTANT = ("--train.lr_schedule=constant", "--train.min_lr_ratio=0")
WSD = ("--train.lr_schedule=wsd", "--train.decay_ratio=0.25", "--train.min_lr_ratio=0")
COSINE = ("--train.lr_schedule=cosine",)


def _run(runner: Runner, name: str, steps: int, words: Sequence[str], *more: str) -> tuple[int, str]:
    words = [*COMMON, *words, f"--train.max_steps={steps}", f"--output_dir={runner.directory / name}"]
    process = runner.start_fork("run", "recipes/llama/sft.json", "--smoke", *words, *more)
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


def _weights(runner: Runner, name: str, step: int) -> list[str]:
    directory = runner.directory / name / "checkpoints" / f"step-{step}"
    files = sorted(directory.rglob("*.safetensors"))
    assert len(files) > 1, "the optimizer's state is there too"
    return [sha256_of(path) for path in files]


@pytest.mark.parametrize(("schedule", "steps"), [(CONSTANT, 3), (WSD, 4)], ids=["constant", "wsd before it falls"])
def test_it_is_the_run_that_had_them_from_the_start(runner: Runner, schedule: Sequence[str], steps: int) -> None:
    longer = f"longer-{steps}"
    whole = f"whole-{steps}"
    saved = f"--checkpoint.save_steps={steps - 1}"
    assert _run(runner, longer, steps, schedule, saved)[0] == 0
    code, said = _run(runner, longer, 8, schedule, "--resume")
    assert code == 0, said
    assert f"resuming from {runner.directory / longer / 'checkpoints' / f'step-{steps}'}" in said
    assert _run(runner, whole, 8, schedule)[0] == 0
    ours, theirs = ({r["step"]: (r["loss"], r["learning_rate"]) for r in runner.metrics(n)} for n in (longer, whole))
    assert ours == theirs
    assert len(ours) == 8
    assert _weights(runner, longer, 8) == _weights(runner, whole, 8)
    events = [json.loads(line) for line in (runner.directory / longer / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] != "saved"] == ["started", "ended", "resumed", "ended"]
    assert "nothing to do: step 8 of 8 is done" in _run(runner, longer, 8, schedule, "--resume")[1]


def test_a_schedule_of_fewer_steps_has_to_be_restated(runner: Runner) -> None:
    assert _run(runner, "cosine", 3, ())[0] == 0  # as --smoke and the recipe have it
    code, said = _run(runner, "cosine", 6, (), "--resume")
    assert code == 2
    assert "step-3: the run had 3 steps and is to have 6; its learning rate was computed for 3 steps with " in said
    assert "restate the schedule: with --train.lr_schedule=" in said
    code, said = _run(runner, "cosine", 6, COSINE, "--resume")
    assert code == 0, said
    assert "learning rate: " in said
    assert "at step 4, as restated" in said
    assert [record["step"] for record in runner.metrics("cosine")] == [1, 2, 3, 4, 5, 6]
    # it is a run of 6 steps now
    code, said = _run(runner, "cosine", 6, (), "--resume")
    assert code == 0
    assert "nothing to do: step 6 of 6 is done" in said
    code, said = _run(runner, "cosine", 5, (), "--resume")
    assert code == 2
    assert "has step 6, and the run is to have 5 steps now" in said
