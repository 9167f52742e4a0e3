"""How tests of whole-step programs make their cases: a job in one process, and its programs on a mesh."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, STEPS, Case, once, run_cases

PROGRAM = ("--engine.mode=to_static", "--engine.program=step")
WORDS = (
    *COMMON, "--engine.recompute=none", "--parallel={}", "--launch.num_devices=1", "--train.micro_batch_size=4",
    "--model.config.num_hidden_layers=2", "--train.lr_schedule=linear",
)  # fmt: skip
SAVES = ("--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}")
TP2 = {"tensor_parallel_degree": 2}
PP2 = {"pipeline_parallel_degree": 2}
FTHENB = {"pipeline_schedule": "FThenB"}
STAGE3 = {"sharding": "stage3"}
SP = {"sequence_parallel": True}
INTERLEAVED = {**PP2, "pipeline_schedule": "interleaved"}


def on_mesh(one: Case, mesh: str, num_ranks: int, parallel: Mapping[str, Any], *more: str) -> Case:
    """The programs of a case of one process on several ranks; further words count before its own."""
    place = (f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={num_ranks}")
    return dataclasses.replace(one, name=mesh, num_ranks=num_ranks, words=once([*one.words, *PROGRAM, *place, *more]))


def resume_from_first(runner: Runner, again: Mapping[str, tuple[str, Case]]) -> None:
    """Run cases under further names, each from the first checkpoint of a run that is given by its name."""
    step = Path("checkpoints") / "step-1"
    cases = []
    for name, (begun, case) in again.items():
        shutil.copytree(runner.directory / begun / step, runner.directory / name / step)
        cases.append(dataclasses.replace(case, name=name, resume=True))
    assert run_cases(runner, cases) == {}


def op_by_op(programs: Case) -> Case:
    """A case of programs in the dynamic mode, on the same ranks."""
    return dataclasses.replace(programs, words=[word for word in programs.words if word not in PROGRAM])
