"""Whole steps of models with routed experts as programs equal the same steps op by op."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import SAVES, SP, TP2, WORDS, on_mesh
from tests.parity.cases import Case, few, once, run_cases
from tests.support.program_experts import AGAIN, EP2, JOBS, TWO, check_equal, check_resumes

ON_RANKS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    # the job, ranks, mesh, words
    "deepseek adamw, again": ("deepseek adamw", 1, {}, (TWO, AGAIN)),
    **{f"{job}, one": (job, 1, {}, (TWO,)) for job in JOBS},
    "dp2": ("deepseek sgd", 2, {}, (TWO,)),
    "stage1": ("deepseek adamw", 2, {"sharding": "stage1"}, (TWO,)),
    "stage3": ("packed", 2, {"sharding": "stage3"}, (TWO,)),
    "tp2 sgd": ("deepseek sgd", 2, TP2, ()),
    "tp2 adamw, again": ("deepseek adamw", 2, {**TP2, **SP}, (AGAIN,)),
    "tp2 qwen_moe": ("qwen_moe", 2, {**TP2, **SP}, ()),
    "tp2 packed": ("packed", 2, TP2, ()),
    "tp2 lora": ("lora", 2, {**TP2, **SP}, ()),
    "tp2 dpo": ("dpo", 2, TP2, (TWO,)),
    "tp2 packed pairs": ("packed pairs", 2, {**TP2, **SP}, (TWO,)),
    "tp2 selective": ("qwen_moe", 2, {**TP2, **SP}, ("--engine.recompute=selective",)),
    "ep2 sgd": ("deepseek sgd", 2, EP2, (TWO,)),
    "ep2 stage1, again": ("deepseek adamw", 2, {**EP2, "sharding": "stage1"}, (TWO, AGAIN)),
    "ep2 stage3": ("packed", 2, {**EP2, "sharding": "stage3"}, (TWO,)),
    "ep2 lora": ("lora", 2, EP2, (TWO,)),
    "tp2 ep2": ("qwen_moe", 4, {**TP2, **SP, **EP2}, (TWO,)),
    "tp2 dp2": ("deepseek adamw", 4, {**TP2, "sharding": "stage2"}, (TWO,)),
}
KEPT = ("deepseek adamw, again", "qwen_moe, one", "kto, one", "stage3", "tp2 sgd", "tp2 lora")
MESHES = few(ON_RANKS, *(mesh for mesh in ON_RANKS if mesh not in KEPT))
"""Of these `make test-further` runs the ones above."""


def _one(job: str) -> Case:
    """The run of a job op by op, in one process."""
    recipe, words = JOBS[job]
    return Case(job, 1, once([*WORDS, *words, *SAVES]), recipe=f"recipes/{recipe}.json")


def _many(mesh: str) -> Case:
    job, ranks, parallel, more = MESHES[mesh]
    return on_mesh(_one(job), mesh, ranks, parallel, *more)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    ones = {job: _one(job) for job, *_ in MESHES.values()}
    return run_cases(runner, [*ones.values(), *map(_many, MESHES)])


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    check_equal(runner, failed, MESHES[mesh][0], mesh)


def test_goes_on_in_either_mode(runner: Runner, failed: dict[str, str]) -> None:
    check_resumes(runner, failed, "deepseek adamw", _many("deepseek adamw, again"))
