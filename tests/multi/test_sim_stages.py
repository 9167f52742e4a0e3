"""Every kind of stage on the simulated accelerator (`tests.device`) equals the CPU, and meshes equal one process."""

from __future__ import annotations

import itertools

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, Case, compare_gradients, once, run_cases
from tests.parity.condition import bf16_gradient_limits, bf16_metric_limits, nudged
from tests.support.sim_runs import of, run_on_sim

_WORDS = once([*COMMON, *OPTIMIZERS["sgd"], "--train.learning_rate=0.02", "--checkpoint.save_steps=null",
               "--parallel={}", "--launch.num_devices=1"])  # fmt: skip
STAGES = {
    name: Case(name, 1, _WORDS, recipe=f"recipes/{recipe}.json")
    for name, recipe in {
        "kto": "llama/kto",
        "rm": "llama/rm",
        "orpo": "llama/orpo",
        "lora": "llama/lora",
        "qlora": "llama/qlora",
        "gkd": "llama/gkd",
        "grpo": "llama/grpo",
        "online dpo": "llama/online_dpo",
        "ppo": "llama/ppo",
        "experts": "qwen_moe/sft",
        "latent attention": "deepseek/sft",
    }.items()
}
MESHES = {
    "grpo, dp2": ("grpo", "{}", ()),
    "grpo, pp2": ("grpo", '{"pipeline_parallel_degree": 2}', ()),
    "ppo, stage3": ("ppo", '{"sharding": "stage3", "sharding_parallel_degree": 2}', ()),
    "experts, ep2": ("experts", '{"expert_parallel_degree": 2}', ()),
    "lora, pp2 in a program": ("lora", '{"pipeline_parallel_degree": 2}', ("--engine.mode=to_static",)),
}
_METRICS = ("loss", "grad_norm")
ROLLOUTS = ("grpo", "online dpo", "ppo")
"""Rounding changes what they sample, and with it everything after the first rollout."""
ROUNDED = [name for name in STAGES if name not in ROLLOUTS]
ROUTED = ("experts", "latent attention")
"""Rounding sends some tokens to other experts, whose gradients are others then."""
PRECISIONS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""The largest relative error of a number that is rounded to it."""
SAMPLED = [(name, kind) for name in ROLLOUTS for kind in PRECISIONS if (name, kind) != ("ppo", "fp16")]
"""Without what is refused: a critic has no loss scale."""


def on_mesh(name: str) -> Case:
    stage, parallel, words = MESHES[name]
    return Case(
        name,
        2,
        once([*_WORDS, f"--parallel={parallel}", "--launch.num_devices=2", *words]),
        recipe=STAGES[stage].recipe,
    )


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [of(case, f"{name} on sim") for name, case in STAGES.items()]
    cases += [of(on_mesh(name), name) for name in MESHES]
    in_16_bits = [*itertools.product(ROUNDED, PRECISIONS), *SAMPLED]
    cases += [of(STAGES[name], f"{name}, {kind}", kind) for name, kind in in_16_bits]
    moved = [run for name in ROUNDED for run in nudged(STAGES[name])]
    return run_cases(runner, [*STAGES.values(), *moved]) | run_on_sim(runner, cases)


def far(runner: Runner, name: str, other: str) -> dict[str, float]:
    """Largest relative difference of each metric over the steps, in units of its limit; the loss of a policy is a sum
    of numbers of about 1 that cancel."""
    found = dict.fromkeys(_METRICS, 0.0)
    for step, (ours, theirs) in enumerate(zip(runner.metrics(name), runner.metrics(other), strict=True), 1):
        limit = LIMIT if step == 1 else 10 * LIMIT  # what is different after an update is what it has magnified
        for key in _METRICS:
            found[key] = max(found[key], abs(theirs[key] - ours[key]) / max(abs(ours[key]), 0.05) / limit)
    return found


@pytest.mark.parametrize("name", STAGES)
def test_it_equals_the_cpu(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {name, f"{name} on sim"} & failed.keys(), failed
    assert max(far(runner, name, f"{name} on sim").values()) <= 1.0


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    stage = MESHES[name][0]
    assert not {stage, name} & failed.keys(), failed
    assert max(far(runner, stage, name).values()) <= 1.0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ROUNDED)
def test_16_bits_are_close_to_float32(runner: Runner, failed: dict[str, str], name: str, precision: str) -> None:
    rounded = f"{name}, {precision}"
    assert not {name, rounded} & failed.keys(), failed
    # weights and what comes out of products are rounded too, not only what goes in, as the limits are for
    part = 2 * PRECISIONS[precision] / PRECISIONS["bf16"]
    limits = bf16_metric_limits(runner, STAGES[name])
    for step, (wide, narrow) in enumerate(zip(runner.metrics(name), runner.metrics(rounded), strict=True), 1):
        for key, limit in limits.items():
            most = part * limit * (1 if step == 1 else 10)  # as in `far`
            distance = abs(narrow[key] / wide[key] - 1)
            print(f"{rounded}, step {step}: {key} {distance:.1e} of at most {most:.1e}")
            assert distance <= most
    if name not in ROUTED:
        most_of = {key: part * limit for key, limit in bf16_gradient_limits(runner, STAGES[name]).items()}
        assert compare_gradients(runner, name, rounded, 0.0, most_of).problems == []


@pytest.mark.parametrize(("name", "precision"), SAMPLED)
def test_rollouts_in_16_bits_are_trained_on(runner: Runner, failed: dict[str, str], name: str, precision: str) -> None:
    rounded = f"{name}, {precision}"
    assert not {name, rounded} & failed.keys(), failed
    steps = list(zip(runner.metrics(name), runner.metrics(rounded), strict=True))
    wide, narrow = steps[0]
    assert abs(narrow["loss"] - wide["loss"]) < 1e-5  # the policy is still the one that has sampled
    for wide, narrow in steps:
        assert 0.5 < narrow["grad_norm"] / wide["grad_norm"] < 2
