"""Pipelines of whole-step programs of models with routed experts equal the same steps op by op."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import FTHENB, INTERLEAVED, PP2, SAVES, SP, STAGE3, TP2, WORDS, on_mesh
from tests.parity.cases import Case, few, once, run_cases
from tests.parity.lora import LORA
from tests.support.program_experts import AGAIN, EP2, EXPERTS, SGD, TWO, check_equal, check_resumes
from tests.support.program_experts import JOBS as OTHER_JOBS

LAYERS = "--model.config.num_hidden_layers=4"
FOUR_EXPERTS = tuple(f"--model.config.{key}" for key in ("n_routed_experts=4", "n_group=2", "topk_group=1"))
JOBS = OTHER_JOBS | {
    # with eight, an adapter of one that few tokens reach knows fewer digits than are compared, also op by op
    "lora": ("deepseek/lora", (*SGD, *LORA, EXPERTS, *FOUR_EXPERTS, "--train.learning_rate=0.2")),
    # of all experts: which ones a token of four layers goes to, rounding would tip, by the processor's order of sums
    "packed pairs": ("qwen_moe/dpo", (*OTHER_JOBS["packed pairs"][1], "--model.config.num_experts_per_tok=8")),
}
ON_RANKS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    # the job, ranks, mesh, words
    "pp2": ("deepseek adamw", 2, PP2, ()),
    "pp2 sgd": ("deepseek sgd", 2, PP2, ()),
    "pp2, FThenB": ("deepseek sgd", 2, {**PP2, **FTHENB}, ()),
    **{f"pp2 {job}": (job, 2, PP2, ()) for job in JOBS if "deepseek" not in job},
    "pp2, again": ("deepseek adamw", 2, PP2, (AGAIN,)),
    "pp2 selective": ("qwen_moe", 2, PP2, ("--engine.recompute=selective",)),
    "pp4": ("deepseek adamw", 4, {"pipeline_parallel_degree": 4}, ()),
    "interleaved": ("deepseek adamw", 2, INTERLEAVED, ()),
    "interleaved sgd": ("deepseek sgd", 2, INTERLEAVED, ()),
    **{f"interleaved {job}": (job, 2, INTERLEAVED, ()) for job in JOBS if "deepseek" not in job},
    "interleaved, again": ("deepseek adamw", 2, INTERLEAVED, (AGAIN,)),
    "tp2 pp2": ("deepseek adamw", 4, {**TP2, **SP, **PP2}, ()),
    "tp2 pp2 qwen_moe, again": ("qwen_moe", 4, {**TP2, **PP2}, (AGAIN,)),
    "tp2 pp2 lora": ("lora", 4, {**TP2, **SP, **PP2}, ()),
    "tp2 pp2 dpo": ("dpo", 4, {**TP2, **SP, **PP2}, ()),
    "tp2 interleaved packed": ("packed", 4, {**TP2, **SP, **INTERLEAVED}, ()),
    "dp2 pp2": ("deepseek sgd", 4, PP2, ()),
    "dp2 pp2 stage1": ("deepseek adamw", 4, {**PP2, "sharding": "stage1"}, ()),
    "dp2 pp2 stage3": ("packed", 4, {**PP2, **STAGE3}, ()),
    "dp2 pp2 stage3, again": ("deepseek adamw", 4, {**PP2, **STAGE3}, (AGAIN,)),
    "dp2 interleaved stage3": ("deepseek adamw", 4, {**INTERLEAVED, **STAGE3}, ()),
    "ep2 pp2": ("deepseek sgd", 4, {**EP2, **PP2}, ()),
    "ep2 pp2 stage1": ("deepseek adamw", 4, {**EP2, **PP2, "sharding": "stage1"}, ()),
    "ep2 pp2 stage3": ("packed", 4, {**EP2, **PP2, **STAGE3}, ()),
    "ep2 pp2 lora": ("lora", 4, {**EP2, **PP2}, ()),
    "ep2 interleaved": ("deepseek adamw", 4, {**EP2, **INTERLEAVED, "sharding": "stage2"}, (AGAIN,)),
    "tp2 pp2 dp2": ("deepseek sgd", 8, {**TP2, **PP2}, ()),
    "tp2 pp2 dp2 stage1": ("deepseek adamw", 8, {**TP2, **SP, **PP2, "sharding": "stage1"}, ()),
    "tp2 pp2 dp2 stage2": ("packed", 8, {**TP2, **SP, **PP2, "sharding": "stage2"}, ()),
    "tp2 pp2 dp2 stage3": ("qwen_moe", 8, {**TP2, **SP, **PP2, **STAGE3}, (AGAIN,)),
    "tp2 pp2 ep2": ("deepseek adamw", 8, {**TP2, **SP, **PP2, **EP2, "sharding": "stage2"}, ()),
    "tp2 dp2 interleaved stage3": ("deepseek sgd", 8, {**TP2, **SP, **INTERLEAVED, **STAGE3}, ()),
}
KEPT = ("pp2", "interleaved lora", "ep2 pp2 stage1")
MESHES = few(ON_RANKS, *(mesh for mesh in ON_RANKS if mesh not in KEPT))
"""Of these `make test-further` runs the ones above."""


def _one(job: str) -> Case:
    recipe, words = JOBS[job]
    return Case(job, 1, once([*WORDS, *words, LAYERS, *SAVES]), recipe=f"recipes/{recipe}.json")


def _many(mesh: str) -> Case:
    job, ranks, parallel, more = MESHES[mesh]
    return on_mesh(_one(job), mesh, ranks, parallel, TWO, *more)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    ones = {job: _one(job) for job, *_ in MESHES.values()}
    return run_cases(runner, [*ones.values(), *map(_many, MESHES)])


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    check_equal(runner, failed, MESHES[mesh][0], mesh)


def test_goes_on_in_either_mode(runner: Runner, failed: dict[str, str]) -> None:
    check_resumes(runner, failed, "deepseek adamw", _many("ep2 pp2 stage1"))
