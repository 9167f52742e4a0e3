"""Fake quantisation on more strategies and of every family, against one process. Long; `make parity` runs it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, run_cases
from tests.parity.qat import BOTH, WEIGHTS, case, problems
from tests.support.qat_words import ADAMW, PP, RECOMPUTE, SP, STATIC, TP

PACKED = ("--qat.weight_bits=8", "--qat.activation_bits=8", "--data.packing=best_fit")
HEAD = ("--qat.weight_bits=8", "--qat.activation_bits=8", '--qat.target_modules=["lm_head", "o_proj", "down_proj"]')


def _sharded(stage: int, degree: int = 1) -> dict[str, object]:
    return {"sharding": f"stage{stage}", "sharding_parallel_degree": degree}


RUNS: dict[str, dict[str, Any]] = {
    "sft": {},
    "weights": {"run": WEIGHTS},
    "packed": {"run": PACKED},
    "head": {"run": HEAD},
    "adamw": ADAMW,
    # a last part of a pipeline that has the tied embedding has a table of positions too, which gets no gradient there
    "gpt": {
        "family": "gpt",
        "stage": "pretrain",
        # sgd reads no beta, of which the recipe has another than the default
        "run": (*BOTH, "--model.config.tie_word_embeddings=false", "--train.adam_beta2=0.999"),
    },
    "qwen": {"family": "qwen"},
    "deepseek": {"family": "deepseek"},
    "deepseek weights": {"family": "deepseek", "run": WEIGHTS},
}
STRATEGIES: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "dp2": ("sft", 2, {}, ()),
    "tp2 sp pp2 recompute": ("sft", 4, {**TP, **SP, **PP}, (RECOMPUTE,)),
    "pp4": ("sft", 4, {"pipeline_parallel_degree": 4}, ()),
    "packed tp2 pp2": ("packed", 4, {**TP, **PP}, ()),
    "head tp2 sp pp2": ("head", 4, {**TP, **SP, **PP}, ()),
    "stage3": ("adamw", 2, _sharded(3), ()),
    "stage1 tp2": ("adamw", 4, {**TP, **_sharded(1)}, ()),
    "stage2 pp2": ("adamw", 4, {**PP, **_sharded(2)}, ()),
    "stage3 tp2 recompute": ("adamw", 4, {**TP, **_sharded(3)}, (RECOMPUTE,)),
    "weights tp2 sp pp2 static recompute": ("weights", 4, {**TP, **SP, **PP}, (STATIC, RECOMPUTE)),
    "weights stage3 static": ("weights", 2, _sharded(3), (STATIC,)),
    "deepseek weights tp2 static": ("deepseek weights", 2, TP, (STATIC,)),
} | {
    f"{family} {name}": (family, num_ranks, parallel, ())
    for family in ("gpt", "qwen", "deepseek")
    for name, num_ranks, parallel in (("tp2 sp", 2, {**TP, **SP}), ("tp2 pp2", 4, {**TP, **PP}))
}


def _one(run: str) -> Case:
    return case(f"one {run}", **RUNS[run])


def _many(name: str) -> Case:
    run, num_ranks, parallel, words = STRATEGIES[name]
    return case(name, num_ranks, parallel, words, **RUNS[run])


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    return run_cases(runner, [*map(_one, RUNS), *map(_many, STRATEGIES)])


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one = _one(STRATEGIES[name][0]).name
    many = _many(name).name
    assert one not in failed, failed[one]
    assert many not in failed, failed[many]
    assert problems(runner, one, many) == []
