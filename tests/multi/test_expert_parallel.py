"""Experts dealt over data ranks train as in one process, with every other axis; checkpoints are of no mesh.

The loss and the bias against uneven loads are on.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, RECIPES, STEPS, Case, compare, few, run_cases

_IN_THREES = ("--train.global_batch_size=9", "--model.config.n_routed_experts=12")

# name: ranks, what is parallel, further words
MESHES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "ep2": (2, {}, ("--train.micro_batch_size=1",)),  # micro-batches of different lengths, which travel as they are
    "ep2 stage1 recompute": (2, {"sharding": "stage1"}, ("--engine.recompute=full",)),
    "ep2 stage3 compiled": (2, {"sharding": "stage3"}, ("--engine.mode=to_static", "--engine.recompute=full")),
    "interleaved": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved", "expert_parallel_degree": 1},
        (),
    ),
    "ep2 tp2": (4, {"tensor_parallel_degree": 2, "sequence_parallel": True}, ()),
    "ep2 pp2": (4, {"pipeline_parallel_degree": 2}, ("--train.micro_batch_size=1",)),
    "ep2 of four, stage2": (4, {"sharding": "stage2"}, ("--train.micro_batch_size=1",)),
    "ep4": (4, {"expert_parallel_degree": 4}, ()),
    "ep3": (3, {"expert_parallel_degree": 3}, ("--train.micro_batch_size=1", *_IN_THREES)),
}
MESHES = few(MESHES, "ep2 of four, stage2", "ep4", "ep3")
WHOLE = {name: "one in threes" if name == "ep3" else "one" for name in MESHES}
"""The same in one process."""
_ONE: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {"expert_parallel_degree": 1}, ("--train.micro_batch_size=8",)),
    "one in threes": (1, {"expert_parallel_degree": 1}, ("--train.micro_batch_size=9", *_IN_THREES)),
}
CONTINUED = {"ep2 stage1 recompute": "ep2 pp2"}
"""A checkpoint of the one, and what goes on from it."""


def _case(name: str, mesh: str, resume: bool = False) -> Case:
    num_ranks, parallel, more = (MESHES | _ONE)[mesh]
    words = [
        *COMMON, *OPTIMIZERS["adamw"], "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}",
        f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps({'expert_parallel_degree': 2, **parallel})}",
        "--engine.recompute=none", "--train.micro_batch_size=2", "--model.family=deepseek",
        "--train.expert_balance_loss=0.3", "--train.expert_bias_rate=0.01", *more,
    ]  # fmt: skip
    last = {word.partition("=")[0]: word for word in words}
    return Case(name, num_ranks, list(last.values()), recipe=RECIPES["tokens"], resume=resume)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [_case(name, name) for name in (*_ONE, *MESHES)])
    cases = []
    for source, target in CONTINUED.items():
        if source not in failed:
            name = f"{source} then {target}"
            step = "checkpoints/step-1"
            shutil.copytree(runner.directory / source / step, runner.directory / name / step)
            cases.append(_case(name, target, resume=True))
    return failed | run_cases(runner, cases)


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    for name in (WHOLE[mesh], mesh):
        assert name not in failed, failed[name]
    assert compare(runner, WHOLE[mesh], mesh).problems == []
    for a, b in zip(runner.metrics(WHOLE[mesh]), runner.metrics(mesh), strict=True):
        for key in ("experts/max_load", "experts/balance_loss"):
            assert a[key] > 1
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)


def test_biases_are_moved(runner: Runner, failed: dict[str, str]) -> None:
    weights = runner.weights("one", STEPS)
    biases = [value for name, value in weights.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for bias in biases:
        assert set(np.round(bias * 100, 4)) <= {-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0}
        assert np.abs(bias).max() > 0


@pytest.mark.parametrize("source", CONTINUED)
def test_a_checkpoint_is_continued_on_another_mesh(runner: Runner, failed: dict[str, str], source: str) -> None:
    name = f"{source} then {CONTINUED[source]}"
    assert name not in failed, failed[name]
    whole = runner.metrics("one")[1:]
    found = runner.metrics(name)
    assert [record["step"] for record in found] == [record["step"] for record in whole] == [2, 3]
    for a, b in zip(whole, found):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
