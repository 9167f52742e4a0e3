"""Interventions on hidden states on eight ranks against one process. `make parity` runs it."""

from __future__ import annotations

from tests.multi.conftest import Runner
from tests.multi.test_lora import PP, TP
from tests.multi.test_reft import ALL, CHANGE_LIMIT, ONE_PASS, STEM
from tests.parity.cases import compare, run_cases
from tests.parity.lora import case


def test_a_mesh_of_all_axes_equals_one_process(runner: Runner) -> None:
    one = case("one", words=ONE_PASS, **ALL)  # type: ignore[arg-type]
    many = case("tp2 pp2 dp2", 8, {**TP, **PP}, **ALL)  # type: ignore[arg-type]
    assert run_cases(runner, [one, many]) == {}
    found = compare(runner, one.name, many.name, STEM, CHANGE_LIMIT)
    print(f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []
