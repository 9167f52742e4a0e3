"""Rollouts of a model that is trained in bf16 on the CPU, on meshes: they compute as the training does.

Rollouts are by the whole model, whose weights the ranks have in parts, so that the first completions are the same on
every mesh. Their log-probabilities are those of the training but for the order of float32's sums, by which some inputs
of products are rounded to another side, and with them inputs of later layers. What rounding changes in all is how far
rollouts in float32 are off, which is measured beside them. As both are roundings of the same numbers, they could be off
by twice that; before the first update they are by less than half of it, and once the weights have moved by less than
it.
"""

from __future__ import annotations

import json

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, few, run_cases

STEPS = 2
WORDS = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.micro_batch_size=2",
    "--train.lr_schedule=constant", "--train.warmup_ratio=0", "--train.optimizer=sgd", "--train.learning_rate=0.1",
    "--data.max_length=64", "--data.eval=null", "--checkpoint.save_steps=null", "--engine.recompute=none",
    "--engine.precision=bf16", "--model.config.num_hidden_layers=4", "--rollout.max_logprob_gap=null",
)  # fmt: skip
_TP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
_PP = {"pipeline_parallel_degree": 2}
RECIPES = {
    "grpo": "recipes/llama/grpo.json", "ppo": "recipes/llama/ppo.json", "online_dpo": "recipes/llama/online_dpo.json",
    "experts": "recipes/qwen_moe/grpo.json", "adapters": "recipes/llama/grpo.json",
}  # fmt: skip
MORE = {"online_dpo": ('--reward.functions={"format": 1.0}',), "adapters": ("--lora.rank=4",)}
MESHES: dict[str, tuple[str, int, dict[str, object]]] = few(
    {
        "grpo, dp2": ("grpo", 2, {}),
        "grpo, tp2": ("grpo", 2, _TP),
        "grpo, pp2": ("grpo", 2, _PP),
        "ppo, pp2": ("ppo", 2, _PP),
        "ppo, tp2": ("ppo", 2, _TP),
        "ppo, dp2": ("ppo", 2, {}),
        "online_dpo, tp2": ("online_dpo", 2, _TP),
        "online_dpo, pp2": ("online_dpo", 2, _PP),
        "online_dpo, stage3": ("online_dpo", 2, {"sharding": "stage3"}),
        "experts, dp2": ("experts", 2, {}),
    },
    "ppo, tp2", "ppo, dp2", "online_dpo, pp2", "experts, dp2",
)  # fmt: skip
FLOAT32 = "in float32"


def _case(name: str, recipe: str, ranks: int, parallel: dict[str, object], mutation: str | None = None) -> Case:
    words = [*WORDS, *MORE.get(recipe, ()), f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}"]
    return Case(name, ranks, words, recipe=RECIPES[recipe], mutation=mutation)


ADAPTERS = [
    _case("adapters", "adapters", 1, {}), _case("adapters, pp2", "adapters", 2, _PP),
    _case("adapters, frozen in float32", "adapters", 1, {}, "frozen_in_float32"),
]  # fmt: skip


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    recipes = dict.fromkeys(recipe for recipe, _, _ in MESHES.values())
    ones = [_case(recipe, recipe, 1, {}) for recipe in recipes]
    ones += [_case(f"{recipe} {FLOAT32}", recipe, 1, {}, "rollouts_in_float32") for recipe in recipes]
    return run_cases(runner, [*ones, *(_case(name, *mesh) for name, mesh in MESHES.items()), *ADAPTERS])


@pytest.mark.parametrize("name", MESHES)
def test_rollouts_compute_as_the_training_on_a_mesh(runner: Runner, failed: dict[str, str], name: str) -> None:
    one = MESHES[name][0]
    in_float32 = f"{MESHES[name][0]} {FLOAT32}"
    assert not {name, one, in_float32} & failed.keys(), failed
    alone = runner.metrics(one)
    records = runner.metrics(name)
    for key in ("tokens", "supervised_tokens", "reward", "completions/length"):
        assert alone[0][key] == records[0][key], "the first completions are the same"
    key = "logprob_gap"
    rounding = [record[key] for record in runner.metrics(in_float32)]
    for record, far in zip([*alone, *records], rounding * 2, strict=True):
        print(f"{name}, step {record['step']}: {key} {record[key]:.1e}, in float32 {far:.1e}")
        assert record[key] <= (far / 2 if record["step"] == 1 else far)
        assert record.get("ratio", 1.0) == 1.0
    assert min(rounding) > 1e-3


def test_adapters_are_merged_with_the_rounded_matrices(runner: Runner, failed: dict[str, str]) -> None:
    """Completions are on every mesh the same, and no further from the training than with matrices of float32."""
    assert not {case.name for case in ADAPTERS} & failed.keys(), failed
    alone, on_stages, wide = (runner.metrics(case.name) for case in ADAPTERS)
    for key in ("tokens", "reward", "logprob_gap"):
        assert [record[key] for record in on_stages] == pytest.approx([record[key] for record in alone], rel=1e-3), key
        assert wide[0][key] == alone[0][key], "adapters begin with nothing"
    assert all(a["logprob_gap"] <= 1.5 * b["logprob_gap"] for a, b in zip(alone, wide, strict=True))
