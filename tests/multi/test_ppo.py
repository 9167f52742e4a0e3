"""A critic beside the model: what both learn is the same on any mesh, and both are in checkpoints."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import run_cases
from tests.parity.ppo import PP, SAVED, SAVING, STEPS, TP, case, compare

SPREADS: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "dp2, by tokens": ("dense", 2, {}, ("--train.micro_batch_tokens=300",)),
    "tp2, sequence parallel": ("dense", 2, TP, ()),
    "stage3, static": ("dense", 2, {"sharding": "stage3"}, ("--engine.mode=to_static",)),
    "adapters, pp2": ("adapters", 2, PP, ()),
}
"""What it is compared with, ranks, what is parallel, and more overrides. There are more in tests/parity."""
RUNS = ("dense", "adapters", "adamw")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    ones = [case(run, run, 1, {}, SAVING) for run in RUNS]
    return run_cases(runner, [*ones, *(case(name, *spread) for name, spread in SPREADS.items())])


@pytest.mark.parametrize("name", SPREADS)
def test_both_models_learn_as_in_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    run = SPREADS[name][0]
    assert run not in failed, failed[run]
    assert name not in failed, failed[name]
    compare(runner, run, name)


def test_there_is_something_to_learn(runner: Runner, failed: dict[str, str]) -> None:
    for run in RUNS:
        records = runner.metrics(run)
        assert all(record["grad_norm"] > 1e-3 for record in records), run
        assert all(record["critic/grad_norm"] > 1e-3 for record in records), run
        first, *_, last = records
        assert first["beta"] == 0.05 != last["beta"], run
        assert [record["ratio"] == 1.0 for record in records] == [True, False, True, False], run


def test_a_resumed_run_equals_one_that_was_never_stopped(runner: Runner, failed: dict[str, str]) -> None:
    directory = runner.directory / "again"
    shutil.copytree(runner.directory / "adamw", directory)
    shutil.rmtree(directory / "checkpoints" / f"step-{STEPS}")
    (directory / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    whole = case("adamw", "adamw", 1, {}, SAVING)
    runner.run("run", whole.recipe, "--smoke", *whole.words, f"--output_dir={directory}", "--resume")
    assert learnt(runner.metrics("again")) == learnt(runner.metrics("adamw"))
    for stem in ("model", "optimizer", "critic"):
        expected = runner.weights("adamw", STEPS, stem)
        found = runner.weights("again", STEPS, stem)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)
        before = runner.weights("adamw", SAVED, stem)
        assert any(not np.array_equal(value, before[key]) for key, value in found.items()), stem
