"""Runs with moments in 8 bits: near one process on other meshes, as they round alike, and resumed bit by bit."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from llmsuite.models.dynamic_map import dynamic_map
from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, STEPS, Case, four_layers, once, plan_of, run_cases
from tests.parity.planned import check_truth

COMMON_8BIT = (*COMMON, *OPTIMIZERS["adamw"], "--train.optimizer=adamw_8bit")
WORDS = {
    # matrices of layers have more than 4,096 elements, and lines that are no multiple of a block
    "llama": (
        *COMMON_8BIT, *four_layers("llama"), "--model.config.hidden_size=72", "--model.config.intermediate_size=100",
        "--model.config.vocab_size=515",
    ),
    "deepseek": COMMON_8BIT,
}  # fmt: skip


def _case(name: str, num_ranks: int, parallel: dict[str, object], family: str = "llama", resume: bool = False) -> Case:
    save = "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}"
    own = (f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}", "--train.micro_batch_size=2")
    words = once([*WORDS[family], *save, *own])
    return Case(name, num_ranks, words, recipe=f"recipes/{family}/sft.json", resume=resume, trace=not resume)


LARGEST_STEP = 0.015
"""Between two values of the maps. Codes next to 0 are closer than the rounding of a gradient."""


def _values(name: str, codes: np.ndarray) -> np.ndarray:
    return dynamic_map(name.endswith("/moment1"))[codes.astype(int) + 128]


ONE = _case("one", 1, {})
ONE_WITH_EXPERTS = _case("one-with-experts", 1, {}, "deepseek")
AGAIN = _case("again", 1, {}, resume=True)
MANY = {
    "tp2, sequence parallel": _case("tp2", 2, {"tensor_parallel_degree": 2, "sequence_parallel": True}),
    "stage1": _case("stage1", 2, {"sharding": "stage1"}),
    "stage2": _case("stage2", 2, {"sharding": "stage2"}),
    "stage3": _case("stage3", 2, {"sharding": "stage3"}),
    "pp2": _case("pp2", 2, {"pipeline_parallel_degree": 2}),
    "experts, ep2, stage2": _case("ep2", 2, {"expert_parallel_degree": 2, "sharding": "stage2"}, "deepseek"),
}
ON_TWO = _case("on-two", 2, {"tensor_parallel_degree": 2}, resume=True)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [ONE, ONE_WITH_EXPERTS, *MANY.values()])
    for name in (AGAIN.name, ON_TWO.name):
        checkpoint = runner.directory / "one" / "checkpoints" / "step-1"
        shutil.copytree(checkpoint, runner.directory / name / "checkpoints" / "step-1")
    return failed | run_cases(runner, [AGAIN, ON_TWO])


@pytest.mark.parametrize("name", [*MANY, ON_TWO.name])
def test_a_mesh_is_near_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    """Gradients differ by rounding, so a moment in the middle of two codes may be stored as the other one, and no
    further."""
    case = MANY.get(name, ON_TWO)
    single = ONE_WITH_EXPERTS.name if case.recipe == ONE_WITH_EXPERTS.recipe else ONE.name
    assert not {single, case.name} & failed.keys(), failed
    ours, theirs = runner.metrics(single), runner.metrics(case.name)
    assert ours[-1]["loss"] < 0.98 * ours[0]["loss"]
    for a, b in zip(ours[-len(theirs) :], theirs, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=LIMIT), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), a["step"]
    one, many = (runner.weights(n, STEPS, "optimizer") for n in (single, case.name))
    assert {n: (v.shape, v.dtype) for n, v in one.items()} == {n: (v.shape, v.dtype) for n, v in many.items()}
    codes = {name for name, value in one.items() if value.dtype == np.int8}
    assert any(name.startswith("model.layers.0") for name in codes)
    assert not any(name.startswith("model.embed_tokens") for name in codes)
    assert any(name.startswith("lm_head") for name in codes)
    far = [np.abs(_values(name, one[name]) - _values(name, many[name])).reshape(-1) for name in codes]
    differ = np.concatenate(far)
    assert differ.max() < LARGEST_STEP
    assert (differ > 1e-5).mean() < 1e-3
    for name in one.keys() - codes:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-6 * np.abs(one[name]).max(), err_msg=name)


@pytest.mark.parametrize("name", MANY)
def test_a_run_is_as_planned(runner: Runner, failed: dict[str, str], name: str) -> None:
    """What ranks send, the scales of the moments too, and what they keep."""
    case = MANY[name]
    assert case.name not in failed, failed
    check_truth(runner.directory / case.name, plan_of(case))


def test_a_run_is_resumed_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"one", "again"} & failed.keys(), failed
    for stem in ("model", "optimizer"):
        one, again = (runner.weights(name, STEPS, stem) for name in ("one", "again"))
        assert one.keys() == again.keys()
        for name, value in one.items():
            assert value.tobytes() == again[name].tobytes(), name
