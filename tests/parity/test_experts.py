"""The loss of uneven experts with every stage, DeepSeek-V2's shape with it, and stage 3 under tensor parallel, against
one process. `tests/multi/test_expert_parallel.py` has V3's shape and the bias on the meshes of experts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import (
    COMMON,
    GRADIENT_LIMIT,
    LIMIT,
    OPTIMIZERS,
    RECIPES,
    STEPS,
    Case,
    compare,
    once,
    run_cases,
)
from tests.parity.condition import gradient_limits, metric_limits, nudged

V2 = (
    "--model.config.model_type=deepseek_v2", "--model.config.topk_method=group_limited_greedy",
    "--model.config.norm_topk_prob=false", "--model.config.q_lora_rank=null",
)  # fmt: skip
TOKENS = (RECIPES["tokens"], "adamw", ("--model.family=deepseek",))
RUNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "dpo": ("recipes/deepseek/dpo.json", "sgd", ()),
    "dpo, adapters": ("recipes/deepseek/dpo.json", "sgd", ("--lora.rank=4", "--dpo.reference=adapter_off")),
    "rm": ("recipes/deepseek/rm.json", "sgd", ("--train.learning_rate=0.05",)),
    "kto": ("recipes/deepseek/kto.json", "sgd", ()),
    "v2": (TOKENS[0], TOKENS[1], (*TOKENS[2], *V2)),
    "v3": (TOKENS[0], TOKENS[1], (*TOKENS[2], "--train.expert_bias_rate=0.01")),
}
"""Recipe, optimizer and overrides."""
TP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
MESHES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "ep2": (2, {"expert_parallel_degree": 2}, ("--train.micro_batch_size=1",)),
    "tp2 pp2": (4, {**TP, "pipeline_parallel_degree": 2}, ()),
    "tp2 stage3": (4, {**TP, "sharding": "stage3"}, ("--engine.recompute=full",)),
    "ep2 tp2 stage3": (4, {**TP, "sharding": "stage3", "expert_parallel_degree": 2}, ("--engine.recompute=full",)),
    "tp2 stage3 compiled": (4, {**TP, "sharding": "stage3"}, ("--engine.recompute=full", "--engine.mode=to_static")),
}
"""Ranks, what is parallel, further words."""
POINTS = list(itertools.product(RUNS, MESHES))


def _case(run: str, mesh: str | None) -> Case:
    recipe, optimizer, words = RUNS[run]
    num_ranks, parallel, more = MESHES[mesh] if mesh else (1, {}, ("--train.micro_batch_size=8",))
    given = [
        *COMMON, *OPTIMIZERS[optimizer], "--engine.recompute=none", "--train.micro_batch_size=2",
        "--train.expert_balance_loss=0.3", f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}",
        "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}", *words, *more,
    ]  # fmt: skip
    name = f"{run}, {mesh}" if mesh else run
    return Case(name, num_ranks, once(given), recipe=recipe)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = [*(_case(run, None) for run in RUNS), *nudged(_case("rm", None))]
    return run_cases(runner, [*ones, *(_case(*point) for point in POINTS)])


@pytest.mark.parametrize(("run", "mesh"), POINTS)
def test_equals_one_process(runner: Runner, failed: dict[str, str], run: str, mesh: str) -> None:
    many = _case(run, mesh).name
    for name in (run, many):
        assert name not in failed, failed[name]
    stem, limit = ("adapter_model", GRADIENT_LIMIT) if "adapters" in run else ("model", LIMIT)
    # the gradient of a gate is a difference: of what the answers of a pair pull at, and of what the experts give, which
    # at the start are much alike
    limits = dict[str, float]()
    of_metrics = dict[str, float]()
    if run == "rm":
        limits, of_metrics = (find(runner, _case(run, None)) for find in (gradient_limits, metric_limits))
    falls = run != "kto"
    found = compare(runner, run, many, stem, limit, falls, gradient_limits=limits, metric_limits=of_metrics)
    print(
        f"{many}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e} of at most "
        f"{max([GRADIENT_LIMIT, *limits.values()]):.1e}, change {found.change:.1e}"
    )
    assert found.problems == []
    for a, b in zip(runner.metrics(run), runner.metrics(many), strict=True):
        for key in ("experts/max_load", "experts/balance_loss"):
            assert a[key] > 1
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
