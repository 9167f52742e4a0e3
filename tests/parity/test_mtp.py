"""Multi-token prediction with adapters, rounded weights and compiled layers, on further meshes against one process.
`make parity` runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import LIMIT, compare_gradients, plan_of, run_cases
from tests.parity.planned import check_truth
from tests.support.mtp_cases import AGAIN, KEPT, PP, SP, TP, case_of, check_equal

STATIC = "--engine.mode=to_static"
INTERLEAVED = {**PP, "pipeline_schedule": "interleaved"}
EP = {"expert_parallel_degree": 2}
MESHES: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "lora, interleaved": ("lora", 2, INTERLEAVED, (KEPT,)),
    "lora, stage3, again": ("lora", 2, {"sharding": "stage3"}, (AGAIN,)),
    "expert lora, tp2 in sequences": ("expert lora", 2, SP, (KEPT,)),
    "expert lora, pp2 ep2 stage1": ("expert lora", 4, {**PP, **EP, "sharding": "stage1"}, (KEPT,)),
    "sft, tp2, static": ("sft", 2, TP, (STATIC, KEPT)),
    "sft, interleaved, static, again": ("sft", 2, INTERLEAVED, (STATIC, AGAIN)),
    "lora, stage3, static": ("expert lora", 2, {"sharding": "stage3"}, (STATIC, KEPT)),
    "lora_ga, tp2 in sequences, again": ("lora_ga", 2, SP, (AGAIN,)),
    "lora_ga, pp2 stage3": ("lora_ga", 4, {**PP, "sharding": "stage3"}, (KEPT,)),
    "qat, tp2 in sequences": ("qat", 2, SP, (AGAIN,)),
    "qat, pp2": ("qat", 2, PP, (KEPT,)),
}
ONES = [f"one {kind}" for kind in dict.fromkeys(kind for kind, *_ in MESHES.values())]


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    return run_cases(runner, [case_of(name, name, meshes=MESHES) for name in (*ONES, *MESHES)])


def check_first_step(runner: Runner, one: str, mesh: str, kind: str) -> None:
    """What rounding leaves equal: in later steps a last bit turns some values to the next step of the grid."""
    a, b = (runner.metrics(name)[0] for name in (one, mesh))
    for key in ("loss", "grad_norm", "mtp_loss"):
        assert b[key] == pytest.approx(a[key], rel=LIMIT), (kind, key)
    assert compare_gradients(runner, one, mesh).problems == []


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_to_one_process_and_as_planned(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    kind = MESHES[mesh][0]
    for name in (f"one {kind}", mesh):
        assert name not in failed, failed[name]
    (check_first_step if kind == "qat" else check_equal)(runner, f"one {kind}", mesh, kind)
    found = check_truth(runner.directory / mesh, plan_of(case_of(mesh, mesh, meshes=MESHES)))
    assert abs(found.memory["between_steps"]) <= 0.01
    assert abs(found.memory["gradients"]) <= 0.01


def test_adapters_of_the_further_layer_begin_with_its_gradient(runner: Runner, failed: dict[str, str]) -> None:
    """Which the loss of further tokens has made: no other loss reaches that layer."""
    assert "one lora_ga" not in failed, failed
    state = runner.weights("one lora_ga", 1, "adapter_state")
    layers = sorted({int(name.split(".")[2]) for name in state})
    began = {name: value for name, value in state.items() if f".{layers[-1]}." in name and name.endswith("0")}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in began} >= {"eh_proj", "o_proj", "down_proj"}
    for name, value in began.items():
        assert np.linalg.matrix_rank(value) == 4, name
