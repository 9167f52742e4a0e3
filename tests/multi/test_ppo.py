"""A critic beside the model: what both learn is the same on any mesh, and both are in checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import LIMIT, OPTIMIZERS, Case, run_cases

STEPS, SAVED = 4, 2
WORDS = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--data.max_length=64", "--train.optimizer=sgd", "--train.learning_rate=0.2",
    "--model.config.num_hidden_layers=4", "--engine.recompute=none", "--data.eval=null",
    "--ppo.updates=2", "--ppo.kl_target=0.01", "--ppo.critic.learning_rate=0.05", "--rollout.temperature=0.8",
)  # fmt: skip
_TP, _PP = {"tensor_parallel_degree": 2, "sequence_parallel": True}, {"pipeline_parallel_degree": 2}
SPREADS: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "micro-batches of 1": ("dense", 1, {}, ("--train.micro_batch_size=1",)),
    "dp2, by tokens": ("dense", 2, {}, ("--train.micro_batch_tokens=300",)),
    "tp2, sequence parallel": ("dense", 2, _TP, ()),
    "pp2": ("dense", 2, _PP, ()),
    "stage2": ("dense", 2, {"sharding": "stage2"}, ()),
    "stage3, static": ("dense", 2, {"sharding": "stage3"}, ("--engine.mode=to_static",)),
    "pp4": ("dense", 4, {"pipeline_parallel_degree": 4}, ()),
    "tp2-pp2": ("adapters", 4, {**_TP, **_PP}, ()),
    "episodes, tp2-pp2": ("episodes", 4, {**_TP, **_PP}, ()),
    "ep2": ("experts", 2, {"expert_parallel_degree": 2}, ()),
}
"""What it is compared with, ranks, what is parallel, and more overrides."""
RUNS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "adapters": ("--lora.rank=4", "--ppo.reference=adapter_off"),
    "episodes": (
        "--environment.name=calculator", "--environment.calculator.pattern=(.)", "--environment.max_turns=3",
        "--environment.max_turn_length=4", "--environment.workers=1", "--rollout.max_completion_length=64",
        "--data.max_length=112", '--reward.functions={"format": 1.0, "environment": 0.5}', "--ppo.gamma=0.99",
        "--ppo.entropy_coef=0.01",
        # gradients are large here: at the rate of the others the step after an update shows its rounding above 1e-6
        "--train.learning_rate=0.05",
    ),
    "experts": ("--train.expert_balance_loss=0.01",),
    "adamw": (*OPTIMIZERS["adamw"], "--ppo.critic.learning_rate=3e-3"),
}  # fmt: skip


def _case(name: str, run: str, ranks: int, parallel: dict[str, object], more: tuple[str, ...]) -> Case:
    recipe = "recipes/qwen_moe/ppo.json" if run == "experts" else "recipes/llama/ppo.json"
    words = [*WORDS, *RUNS[run], f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", *more]
    sized = any(word.startswith("--train.micro_batch_size") for word in more)
    words += [] if sized else [f"--train.micro_batch_size={8 if ranks == 1 else 2}"]
    if not any("save_steps" in word for word in more):
        words.append("--checkpoint.save_steps=null")
    return Case(name, ranks, list({word.partition("=")[0]: word for word in words}.values()), recipe=recipe)


_SAVING = (f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=2")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    ones = [_case(run, run, 1, {}, _SAVING) for run in RUNS]
    return run_cases(runner, [*ones, *(_case(name, *spread) for name, spread in SPREADS.items())])


@pytest.mark.parametrize("name", SPREADS)
def test_both_models_learn_as_in_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    run = SPREADS[name][0]
    assert run not in failed, failed[run]
    assert name not in failed, failed[name]
    alone, found = runner.metrics(run), runner.metrics(name)
    assert len(alone) == len(found) == STEPS
    for a, b in zip(alone, found, strict=True):
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}  # the same completions
        assert abs(a["loss"] - b["loss"]) <= LIMIT
        for key in _CLOSE:
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=1e-7), key
        assert ("entropy/exact" in b) == (run == "episodes")
        assert math.isclose(a.get("entropy/exact", 0), b.get("entropy/exact", 0), rel_tol=LIMIT)
        for key in ("critic/values", "returns"):  # means of numbers of either sign, about 1 each
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=LIMIT), key
        for key in ("kl", "kl/completion"):  # differences of log-probabilities, and at first 0
            assert math.isclose(a[key], b[key], rel_tol=1e-4, abs_tol=1e-5), key


_EXACT = ("tokens", "supervised_tokens", "reward", "completions/length")
_CLOSE = ("grad_norm", "ratio", "critic/loss", "critic/grad_norm", "critic/error")


def test_episodes_have_several_turns(runner: Runner, failed: dict[str, str]) -> None:
    for name in ("episodes", "episodes, tp2-pp2"):
        records = runner.metrics(name)
        assert all(record["episodes/turns"] > 1.5 < record["episodes/observed"] for record in records)


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
    case = _case("adamw", "adamw", 1, {}, _SAVING)
    runner.run("run", case.recipe, "--smoke", *case.words, f"--output_dir={directory}", "--resume")
    assert _lasting(runner.metrics("again")) == _lasting(runner.metrics("adamw"))
    for stem in ("model", "optimizer", "critic"):
        expected, found = runner.weights("adamw", STEPS, stem), runner.weights("again", STEPS, stem)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)
        before = runner.weights("adamw", SAVED, stem)
        assert any(not np.array_equal(value, before[key]) for key, value in found.items()), stem


def _lasting(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    machine = ("avg_", "speed", "ips", "peak_memory_bytes")
    return [{key: value for key, value in record.items() if not key.startswith(machine)} for record in records]
