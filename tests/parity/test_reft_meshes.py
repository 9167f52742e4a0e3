"""Interventions on hidden states on more meshes, against one process. `make parity` runs it."""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, run_cases
from tests.parity.lora import case
from tests.support.lora_meshes import INTERLEAVED, PP, RECOMPUTE, TP
from tests.support.reft_runs import ALL, CHANGE_LIMIT, ONES, SOME, STEM

MANY: dict[str, tuple[str, Case]] = {
    "tp2": ("some", case("tp", 2, TP, **SOME)),  # type: ignore[arg-type]
    "pp2 interleaved": ("all", case("pp", 2, INTERLEAVED, **ALL)),  # type: ignore[arg-type]
    "stage3, recompute": ("some", case("stage3-again", 2, {"sharding": "stage3"}, (RECOMPUTE,), **SOME)),  # type: ignore[arg-type]
    "tp2 pp2 dp2": ("all", case("tp2 pp2 dp2", 8, {**TP, **PP}, **ALL)),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    return run_cases(runner, [*ONES.values(), *(many for _, many in MANY.values())])


@pytest.mark.parametrize("name", MANY)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = MANY[name]
    assert one not in failed, failed[one]
    assert many.name not in failed, failed[many.name]
    found = compare(runner, one, many.name, STEM, CHANGE_LIMIT)
    print(f"{name}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []
