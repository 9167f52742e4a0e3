"""Interventions on hidden states change no number on any strategy, and go on from a checkpoint bit by bit."""

from __future__ import annotations

import shutil

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import STEPS, Case, compare, run_cases
from tests.parity.lora import case
from tests.support.lora_meshes import PP, RECOMPUTE, SP, TP
from tests.support.reft_runs import ALL, CHANGE_LIMIT, ONE_PASS, ONES, SOME, STEM

MANY: dict[str, tuple[str, Case]] = {
    "tp2, sequence parallel, recompute": ("all", case("tp-sp", 2, {**TP, **SP}, (RECOMPUTE,), **ALL)),  # type: ignore[arg-type]
    "pp2, some": ("some", case("pp-some", 2, PP, (RECOMPUTE,), **SOME)),  # type: ignore[arg-type]
    "stage3": ("all", case("stage3", 2, {"sharding": "stage3"}, **ALL)),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [*ONES.values(), *(many for _, many in MANY.values())])
    shutil.copytree(runner.directory / "all/checkpoints/step-1", runner.directory / "again/checkpoints/step-1")
    return failed | run_cases(runner, [case("again", words=ONE_PASS, resume=True, **ALL)])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MANY)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = MANY[name]
    assert one not in failed, failed[one]
    assert many.name not in failed, failed[many.name]
    found = compare(runner, one, many.name, STEM, CHANGE_LIMIT)
    print(f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []


def test_a_checkpoint_is_continued_bit_by_bit(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"all", "again"} & failed.keys(), failed
    for stem in (STEM, "optimizer"):
        whole, again = (runner.weights(name, STEPS, stem) for name in ("all", "again"))
        assert whole.keys() == again.keys()
        for name, value in whole.items():
            assert value.tobytes() == again[name].tobytes(), name
