"""Completions are the same on any mesh, and what is learnt from them; checkpoints hold nothing of a rollout."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import LIMIT, Case, few, run_cases

STEPS = 4
SAVED = 2
WORDS = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--train.optimizer=sgd", "--train.learning_rate=0.2", "--data.max_length=64",
    "--rollout.batch_size=10", "--model.config.num_hidden_layers=4", "--engine.recompute=none",
)  # fmt: skip
ANOTHER = "DIRECTORY_OF_PLAIN"
"""The run of this name, which is done before those that take it as their reference."""
_TP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
_PP = {"pipeline_parallel_degree": 2}
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "adapters": (
        "--lora.rank=4", "--grpo.reference=adapter_off", "--grpo.beta=0.1", "--grpo.loss=grpo",
        "--grpo.entropy_coef=0.1",
    ),
    "updates": (
        "--grpo.updates=2", "--grpo.reference=copy", "--grpo.beta=0.1", "--rollout.temperature=0.8",
        "--grpo.loss=dr_grpo", "--grpo.scale_rewards=none", "--grpo.entropy_coef=0.1",
        "--train.learning_rate=0.05",
    ),
    "pairs": (f"--online_dpo.reference={ANOTHER}", "--online_dpo.sft_weight=0.1", "--train.learning_rate=0.05"),
    "dynamic": ("--rollout.dynamic_sampling=true", "--rollout.max_rounds=3", "--rollout.num_generations=2"),
    "episodes": (
        "--environment.name=calculator", "--environment.calculator.pattern=(.)", "--environment.max_turns=3",
        "--environment.max_turn_length=4", "--environment.workers=1", "--rollout.max_completion_length=64",
        "--data.max_length=112", '--reward.functions={"format": 1.0, "environment": 0.5}',
    ),
    "experts": ("--grpo.importance_sampling_level=sequence",),
}  # fmt: skip
SPREADS: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "micro-batches of 1": ("plain", 1, {}, ("--train.micro_batch_size=1", "--rollout.batch_size=100")),
    "dp2, by tokens": ("plain", 2, {}, ("--train.micro_batch_tokens=300",)),
    "tp2, sequence parallel": ("plain", 2, _TP, ("--data.group_by_length=false",)),
    "stage3, static": ("plain", 2, {"sharding": "stage3"}, ("--engine.mode=to_static",)),
    "pp4": ("plain", 4, {"pipeline_parallel_degree": 4}, ()),
    "adapters, tp2-pp2": ("adapters", 4, {**_TP, **_PP}, ()),
    "updates, stage3": ("updates", 2, {"sharding": "stage3"}, ()),
    "pairs, stage3": ("pairs", 2, {"sharding": "stage3"}, ()),
    "pairs, tp2-pp2": ("pairs", 4, {**_TP, **_PP}, ()),
    "dynamic, pp4": ("dynamic", 4, {"pipeline_parallel_degree": 4}, ()),
    "episodes, dp2-tp2": ("episodes", 4, _TP, ()),
    "experts, ep2": ("experts", 2, {"expert_parallel_degree": 2}, ()),
}
"""What it is compared with, ranks, what is parallel, and more overrides."""
SPREADS = few(SPREADS, "micro-batches of 1", "pp4", "pairs, tp2-pp2", "dynamic, pp4")


def _case(directory: Path, name: str, run: str, ranks: int, parallel: dict[str, object], more: tuple[str, ...]) -> Case:
    others = {"experts": "recipes/qwen_moe/grpo.json", "pairs": "recipes/llama/online_dpo.json"}
    recipe = others.get(run, "recipes/llama/grpo.json")
    words = [*WORDS, *RUNS[run], f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", *more]
    sized = any(word.startswith("--train.micro_batch_size") for word in more)
    words = [word.replace(ANOTHER, f"{directory}/plain") for word in words]
    words += [] if sized else [f"--train.micro_batch_size={8 if ranks == 1 else 2}"]
    if not any("save_steps" in word for word in more):
        words.append("--checkpoint.save_steps=null")
    if run != "plain" or ranks > 1:
        words.append("--data.eval=null")
    return Case(name, ranks, list({word.partition("=")[0]: word for word in words}.values()), recipe=recipe)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    saved = (f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=2")
    ones = [_case(runner.directory, run, run, 1, {}, saved) for run in RUNS]
    return run_cases(runner, [*ones, *(_case(runner.directory, name, *spread) for name, spread in SPREADS.items())])


@pytest.mark.parametrize("name", SPREADS)
def test_rollouts_and_updates_equal_those_of_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    run = SPREADS[name][0]
    assert run not in failed, failed[run]
    assert name not in failed, failed[name]
    alone = runner.metrics(run)
    found = runner.metrics(name)
    assert len(alone) == len(found) == STEPS
    for a, b in zip(alone, found, strict=True):
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}  # the same completions
        assert abs(a["loss"] - b["loss"]) <= LIMIT
        own = ("logps/chosen", "nll/chosen", "pairs/tied") if run == "pairs" else ("ratio",)
        for key in ("grad_norm", "entropy", *own, *(["kl"] if run in ("adapters", "updates") else [])):
            assert math.isclose(a[key], b[key], rel_tol=1e-4 if key == "kl" else LIMIT, abs_tol=1e-8), key
        if run == "pairs":  # differences of log-probabilities, each about -100 and known to 1e-5 by float32
            assert abs(a["rewards/margin"] - b["rewards/margin"]) <= 1e-5
        assert ("entropy/exact" in b) == (run in ("adapters", "updates"))
        assert math.isclose(a.get("entropy/exact", 0), b.get("entropy/exact", 0), rel_tol=LIMIT)


_EXACT = ("tokens", "supervised_tokens", "reward", "rewards/format", "completions/length", "groups/without_signal")


def test_episodes_have_several_turns(runner: Runner, failed: dict[str, str]) -> None:
    for name in ("episodes", "episodes, dp2-tp2"):
        records = runner.metrics(name)
        assert all(record["episodes/turns"] > 1.5 < record["episodes/observed"] for record in records)
        assert all(record["rewards/missing"] == 0 < record["rewards/environment/calls"] for record in records)


def test_there_is_something_to_learn(runner: Runner, failed: dict[str, str]) -> None:
    for run in RUNS:
        assert any(record["grad_norm"] > 1e-3 for record in runner.metrics(run)), run


def test_the_ratio_is_one_until_something_is_updated(runner: Runner, failed: dict[str, str]) -> None:
    for name in [*RUNS, *SPREADS]:
        if "pairs" in name:  # which have none
            continue
        first_updates = runner.metrics(name)[:: 2 if "updates" in name else 1]
        assert all(record["ratio"] == 1.0 for record in first_updates), name
    assert all(record["ratio"] != 1.0 for record in runner.metrics("updates")[1::2])


def test_rollouts_and_training_compute_the_same(runner: Runner, failed: dict[str, str]) -> None:
    for name in [*RUNS, *SPREADS]:
        assert all(record.get("logprob_gap/max", record["logprob_gap"]) <= 1e-4 for record in runner.metrics(name)), (
            name
        )


@pytest.mark.parametrize("run", ["plain", "updates", "dynamic", "pairs", "episodes"])
def test_a_resumed_run_equals_one_that_was_never_stopped(runner: Runner, failed: dict[str, str], run: str) -> None:
    name = f"{run} again"
    directory = runner.directory / name
    shutil.copytree(runner.directory / run, directory)
    shutil.rmtree(directory / "checkpoints" / f"step-{STEPS}")
    (directory / "checkpoints" / "latest").write_text(f"step-{SAVED}\n")
    case = _case(runner.directory, run, run, 1, {}, (f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=2"))
    runner.run("run", case.recipe, "--smoke", *case.words, f"--output_dir={directory}", "--resume")
    assert learnt(runner.metrics(name)) == learnt(runner.metrics(run))
    for stem in ("model", "optimizer"):
        expected = runner.weights(run, STEPS, stem)
        found = runner.weights(name, STEPS, stem)
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[key], found[key]) for key in expected)


def test_other_prompts_take_the_place_of_those_without_a_signal(runner: Runner, failed: dict[str, str]) -> None:
    taken = 0
    records = runner.metrics("dynamic")
    epoch = records[0]["groups/sampled"] / records[0]["epoch"]
    for record in records:
        taken += record["groups/sampled"]
        assert record["epoch"] == pytest.approx(taken / epoch)
        assert record["groups/without_signal"] < 1
    assert taken > STEPS * 8
    state = json.loads((runner.directory / "dynamic" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())
    assert state["samples"] == taken


def test_an_evaluation_draws_completions(runner: Runner, failed: dict[str, str]) -> None:
    lines = (runner.directory / "plain" / "metrics.jsonl").read_text().splitlines()
    (record,) = (found for line in lines if "eval/reward" in (found := json.loads(line)))
    assert 0 <= record["eval/pass@1"] == record["eval/reward"] <= 1
