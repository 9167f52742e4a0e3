"""Runs on files that are larger than what is held in memory: the same run, bit for bit, that goes on at the exact row.

The large file has the rows of the small one, each with a wide column that no stage reads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmsuite.data.disk_rows import MAX_IN_MEMORY_BYTES, is_large
from tests.multi.conftest import Runner, learnt
from tests.parity.cases import few
from tests.support.paths import DATA

STEPS = 4
SAME = ("--data.num_workers=2", f"--train.max_steps={STEPS}", "--train.global_batch_size=8",
        "--train.micro_batch_size=2", "--train.num_epochs=null", "--checkpoint.save_steps=2",
        "--checkpoint.keep_last=3", '--data.ignore_columns=["*"]')  # fmt: skip
_CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sft": ("recipes/llama/sft.json", "sft", ()),
    "sft, packed": ("recipes/llama/sft.json", "sft", ("--data.packing=best_fit", "--data.max_length=160")),
    "dpo": ("recipes/llama/dpo.json", "preference", ()),
    "kto": ("recipes/llama/kto.json", "unpaired", ()),
}
CASES = few(_CASES, "sft", "kto")


def widened(source: Path, target: Path) -> Path:
    """The rows of a file, in one that is not held in memory."""
    lines = source.read_text(encoding="utf-8").splitlines()
    width = MAX_IN_MEMORY_BYTES // len(lines) + 1
    with open(target, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({**json.loads(line), "note": "x" * width}) + "\n")
    assert is_large(target)
    assert not is_large(source)
    return target


def evaluations(runner: Runner, name: str) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (runner.directory / name / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in r.items() if k.startswith("eval")} for r in records if any(k.startswith("eval") for k in r)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_large_file_is_the_same_run(name: str, runner: Runner) -> None:
    recipe, folder, more = CASES[name]
    small_files = [DATA / folder / f"{part}.jsonl" for part in ("train", "eval")]
    large_files = [widened(file, runner.directory / f"{name} {file.name}") for file in small_files]
    words = ["run", recipe, "--smoke", *SAME, *more]
    small_data, large_data = (
        [f"--data.{part}={file}" for part, file in zip(("train", "eval"), files)]
        for files in (small_files, large_files)
    )
    for run, data in (("small", small_data), ("large", large_data)):
        runner.run(*words, *data, f"--output_dir={runner.directory / f'{name} {run}'}")
    small, found = (runner.metrics(f"{name} {run}") for run in ("small", "large"))
    evaluated = [evaluations(runner, f"{name} {run}") for run in ("small", "large")]
    assert evaluated[0] == evaluated[1] != []
    assert len(small) == STEPS
    assert learnt(found) == learnt(small)

    again = runner.directory / f"{name} again"
    shutil.copytree(runner.directory / f"{name} large", again)
    for step in range(4, STEPS + 1, 2):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    said = runner.run(*words, *large_data, f"--output_dir={again}", "--resume")
    assert f"resuming from {again}/checkpoints/step-2" in said
    assert learnt(runner.metrics(f"{name} again")) == learnt(small)
    whole, resumed = (runner.weights(f"{name} {run}", STEPS) for run in ("large", "again"))
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[key], resumed[key]) for key in whole)
    for file in large_files:
        file.unlink()
