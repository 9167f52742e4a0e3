"""Supervised fine-tuning on any mesh equals one process, though micro-batches differ in weight; and resumes exactly."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, run_cases

RECIPE = "recipes/llama/sft.json"
WORDS = (*COMMON, *OPTIMIZERS["sgd"])
ONE = Case(
    "one",
    1,
    [
        *WORDS, "--parallel={}", "--launch.num_devices=1", "--train.micro_batch_size=8", "--engine.recompute=none",
        "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}",
    ],
    recipe=RECIPE,
)  # fmt: skip
_ALL = '{"tensor_parallel_degree":2,"pipeline_parallel_degree":2,"sequence_parallel":true}'
MANY = [
    Case(
        name,
        ranks,
        [
            *WORDS, f"--parallel={parallel}", f"--launch.num_devices={ranks}", f"--train.micro_batch_size={micro}",
            f"--engine.mode={mode}", "--checkpoint.save_steps=null",
        ],
        recipe=RECIPE,
    )
    for name, ranks, parallel, micro, mode in (
        ("dp2 accumulating", 2, "{}", 2, "dynamic"),
        ("tp2 in sequences", 2, '{"tensor_parallel_degree":2,"sequence_parallel":true}', 4, "dynamic"),
        ("pp2", 2, '{"pipeline_parallel_degree":2}', 1, "dynamic"),
        ("tp2 compiled", 2, '{"tensor_parallel_degree":2}', 4, "to_static"),
        ("all at once", 4, _ALL, 2, "dynamic"),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    return run_cases(runner, [ONE, *MANY])


@pytest.mark.parametrize("name", [case.name for case in MANY])
def test_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert ONE.name not in failed, failed[ONE.name]
    assert name not in failed, failed[name]
    assert compare(runner, ONE.name, name).problems == []


def test_resumes_bit_exactly(runner: Runner, failed: dict[str, str]) -> None:
    assert ONE.name not in failed, failed[ONE.name]
    again = runner.directory / "again"
    shutil.copytree(runner.directory / ONE.name, again)
    for step in range(2, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    words = ["run", RECIPE, "--smoke", *ONE.words, f"--output_dir={again}", "--resume"]
    assert f"resuming from {again}/checkpoints/step-1" in runner.run(*words)
    assert learnt(runner.metrics("again")) == learnt(runner.metrics(ONE.name))
    for stem in ("model", "optimizer"):
        whole, resumed = (runner.weights(name, STEPS, stem) for name in (ONE.name, "again"))
        assert whole.keys() == resumed.keys()
        assert all(np.array_equal(whole[key], resumed[key]) for key in whole)
