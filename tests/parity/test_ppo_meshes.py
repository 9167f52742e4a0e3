"""PPO on more meshes, with experts and with episodes of several turns, against one process. `make parity` runs it."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import run_cases
from tests.parity.ppo import PP, TP, case, compare

SPREADS: dict[str, tuple[str, int, dict[str, object], tuple[str, ...]]] = {
    "micro-batches of 1": ("dense", 1, {}, ("--train.micro_batch_size=1",)),
    "pp2": ("dense", 2, PP, ()),
    "stage2": ("dense", 2, {"sharding": "stage2"}, ()),
    "pp4": ("dense", 4, {"pipeline_parallel_degree": 4}, ()),
    "tp2-pp2": ("adapters", 4, {**TP, **PP}, ()),
    "episodes, tp2-pp2": ("episodes", 4, {**TP, **PP}, ()),
    "ep2": ("experts", 2, {"expert_parallel_degree": 2}, ()),
}
"""What it is compared with, ranks, what is parallel, and more overrides."""
RUNS = ("dense", "adapters", "episodes", "experts")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    ones = [case(run, run, 1, {}, ()) for run in RUNS]
    return run_cases(runner, [*ones, *(case(name, *spread) for name, spread in SPREADS.items())])


@pytest.mark.parametrize("name", SPREADS)
def test_both_models_learn_as_in_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    run = SPREADS[name][0]
    assert run not in failed, failed[run]
    assert name not in failed, failed[name]
    compare(runner, run, name)


def test_episodes_have_several_turns(runner: Runner, failed: dict[str, str]) -> None:
    for name in ("episodes", "episodes, tp2-pp2"):
        records = runner.metrics(name)
        assert all(record["episodes/turns"] > 1.5 < record["episodes/observed"] for record in records)


def test_there_is_something_to_learn(runner: Runner, failed: dict[str, str]) -> None:
    for run in ("episodes", "experts"):
        assert all(record["grad_norm"] > 1e-3 < record["critic/grad_norm"] for record in runner.metrics(run)), run
