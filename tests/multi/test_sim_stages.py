"""Every kind of stage on the simulated accelerator (`tests.device`) equals the CPU, and meshes equal one process."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, LIMIT, OPTIMIZERS, Case, once, run_cases
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
    return run_cases(runner, STAGES.values()) | run_on_sim(runner, cases)


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
