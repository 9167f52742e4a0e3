"""Turns with fractional weights, and dynamic fine-tuning: any mesh, packing and program equals one process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import PROGRAM
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, once, run_cases
from tests.support.paths import DATA

WEIGHTS = (0.25, 1, 3, 0.5)
TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}
LOSSES = ("nll", "dft")
MESHES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "micro-batches": (1, {}, ("--train.micro_batch_size=2",)),
    "program": (1, {}, PROGRAM),
    "dp2": (2, {}, ("--train.micro_batch_size=2",)),
    "tp2 in sequences": (2, {**TP, "sequence_parallel": True}, ()),
    "tp2 program": (2, TP, PROGRAM),
    "pp2": (2, PP, ("--train.micro_batch_size=2",)),
    "dp2 in chunks": (2, {}, ("--engine.loss_chunk_tokens=16",)),
}


def rows(path: Path) -> Path:
    """The embedded conversations, whose answers have other weights each."""
    lines = []
    for i, line in enumerate((DATA / "sft" / "train.jsonl").read_text().splitlines()):
        row = json.loads(line)
        for j, turn in enumerate(row["messages"]):
            if turn["role"] == "assistant":
                turn["weight"] = WEIGHTS[(i + j) % 4]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


def cases(data: Path) -> list[Case]:
    made = []
    for loss in LOSSES:
        words = [
            *COMMON, *OPTIMIZERS["sgd"], f"--data.train={data}", "--parallel={}", "--launch.num_devices=1",
            "--train.micro_batch_size=4", "--engine.recompute=none", f"--sft.loss={loss}",
            "--model.config.num_hidden_layers=2", "--data.max_length=128",
            "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}",
        ]  # fmt: skip
        one = Case(f"{loss} one", 1, once(words), recipe="recipes/llama/sft.json")
        made.append(one)
        for mesh, (ranks, parallel, more) in MESHES.items():
            place = (f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}")
            case = dataclasses.replace(one, name=f"{loss} {mesh}", num_ranks=ranks, words=once([*words, *place, *more]))
            made.append(case)
    return made


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    return run_cases(runner, cases(rows(runner.directory / "weighted.jsonl")))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], loss: str, mesh: str) -> None:
    one = f"{loss} one"
    many = f"{loss} {mesh}"
    assert not failed.keys() & {one, many}, failed
    has_gradients = "program" not in mesh
    assert compare(runner, one, many, falls=loss == "nll", has_gradients=has_gradients).problems == []
