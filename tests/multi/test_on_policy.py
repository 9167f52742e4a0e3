"""Distillation on answers of the model: the same on any mesh, and in a resumed run."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, Case, once, run_cases

RECIPE = "recipes/llama/gkd-on-policy.json"
STEPS = 4
SAVED = 2
DRAWN = [0.0, 1.0, 1.0, 1.0]
"""Steps that train on sampled answers: `random.Random(42 + i).random() <= 0.5`."""
WORDS = (
    *COMMON, *OPTIMIZERS["sgd"], f"--train.max_steps={STEPS}", "--data.max_length=96", "--engine.recompute=none",
    "--rollout.num_generations=2", "--rollout.top_k=8", "--gkd.sft_weight=0.1",
)  # fmt: skip
"""Of few likely tokens, the same one is sampled although probabilities differ by rounding: of all 512, a number that is
drawn falls between two of them in one of some thousand tokens, on some processors."""
_TP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
_PP = {"pipeline_parallel_degree": 2}
MEAN = ("--gkd.mean=micro_batches", "--data.group_by_length=false", "--train.micro_batch_size=2")
SPREADS: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "dp2": ("plain", 2, {}, ("--train.micro_batch_size=1",)),
    "tp2": ("plain", 2, _TP, ("--train.micro_batch_size=4",)),
    "pp2": ("plain", 2, _PP, ("--train.micro_batch_size=2",)),
    "means, stage3": ("means", 2, {"sharding": "stage3"}, MEAN),
}
"""The run in one process, ranks, what is parallel, and more overrides."""


def _case(name: str, ranks: int, parallel: dict[str, object], more: tuple[str, ...]) -> Case:
    words = [*WORDS, "--checkpoint.save_steps=null", f"--launch.num_devices={ranks}"]
    return Case(name, ranks, once([*words, f"--parallel={json.dumps(parallel)}", *more]), recipe=RECIPE)


SAVES = (f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=2")
ONES = {
    "plain": _case("plain", 1, {}, ("--train.micro_batch_size=8", *SAVES)),
    "means": _case("means", 1, {}, MEAN),
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    cases = [_case(name, ranks, parallel, more) for name, (_, ranks, parallel, more) in SPREADS.items()]
    return run_cases(runner, [*ONES.values(), *cases])


@pytest.mark.parametrize("name", SPREADS)
def test_sampled_answers_and_updates_equal_those_of_one_process(
    runner: Runner, failed: dict[str, str], name: str
) -> None:
    run = SPREADS[name][0]
    assert run not in failed, failed[run]
    assert name not in failed, failed[name]
    alone = runner.metrics(run)
    found = runner.metrics(name)
    assert [record["on_policy"] for record in found] == DRAWN
    for a, b in zip(alone, found, strict=True):
        for key in ("tokens", "supervised_tokens", "completions/length", "completions/truncated"):
            assert a.get(key) == b.get(key), key  # the same answers
        for key in ("loss", "grad_norm", "divergence", "nll"):
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=LIMIT), key
        assert ("completions/length" in b) == (b["on_policy"] == 1.0)


def test_a_mean_of_micro_batches_is_another_one(runner: Runner, failed: dict[str, str]) -> None:
    assert not failed, failed
    plain, means = (runner.metrics(run)[0] for run in ("plain", "means"))
    assert plain["supervised_tokens"] == means["supervised_tokens"]
    assert abs(plain["loss"] - means["loss"]) > 1e-5


def test_a_resumed_run_equals_one_that_was_never_stopped(runner: Runner, failed: dict[str, str]) -> None:
    assert "plain" not in failed, failed["plain"]
    directory = runner.directory / "again"
    shutil.copytree(runner.directory / "plain", directory)
    shutil.rmtree(directory / "checkpoints" / f"step-{STEPS}")
    (directory / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    runner.run("run", RECIPE, "--smoke", *ONES["plain"].words, f"--output_dir={directory}", "--resume")
    assert learnt(runner.metrics("again")) == learnt(runner.metrics("plain"))
    expected, found = (runner.weights(run, STEPS, "model") for run in ("plain", "again"))
    assert all(np.array_equal(expected[key], found[key]) for key in expected)
