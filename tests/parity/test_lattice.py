"""Every point of the lattice against one process. Long; `make parity` runs it and writes the table of the docs."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.contract.registry import PluginInfo
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.multi.conftest import Runner
from tests.parity import page, token_stage
from tests.parity.cases import Comparison, compare, many_processes, one_process, plan_of, run_points
from tests.parity.planned import check_truth
from tests.parity.points import DIMENSIONS, Point, covering, legal, short
from tests.support.paths import ROOT

results: dict[Point, Comparison] = {}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all points; what was printed of those that did not end well."""
    return run_points(runner, covering(), trace=True)


@pytest.mark.parametrize("point", covering(), ids=str)
def test_point(runner: Runner, failed: dict[str, str], point: Point) -> None:
    one = one_process(point).name
    many = many_processes(point).name
    assert one not in failed, failed[one]
    assert many not in failed, failed[many]
    results[point] = compare(runner, one, many)
    assert results[point].problems == []


@pytest.mark.parametrize("point", covering(), ids=str)
def test_a_strategy_is_as_planned(runner: Runner, failed: dict[str, str], point: Point) -> None:
    """Calls and bytes of every rank exactly, passes in their order, live memory nearly."""
    case = many_processes(point)
    assert case.name not in failed, failed[case.name]
    check_truth(runner.directory / case.name, plan_of(case))


def test_write_table(request: pytest.FixtureRequest) -> None:
    """With `--write-parity-table`: put what was measured into docs/notes/parity.md."""
    if not request.config.getoption("--write-parity-table"):
        return
    assert len(results) == len(covering()), "only a whole run is worth writing down"
    names = [dimension.name for dimension in DIMENSIONS]
    columns = ["ranks", *(name.replace("_", " ") for name in names), "metrics", "gradients"]
    rows = [
        [point.num_ranks, *(_cell(point[name]) for name in names), f"{found.metrics:.1e}", f"{found.gradients:.1e}"]
        for point, found in sorted(results.items(), key=lambda item: (item[0].num_ranks, item[0].values))
    ]
    page.write("parity", columns, rows)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value in ("none", None) else str(value)


def test_points_cover_every_pair_and_are_legal() -> None:
    registry = registry_with()
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    points = covering()
    assert len(points) == len(set(points)) >= 60
    assert {p.num_ranks for p in points} == {2, 4, 8}
    assert set().union(*(p.pairs() for p in points)) == set().union(*(p.pairs() for p in legal()))
    for point in {*points, *short()}:
        case = many_processes(point)
        plan = plan_run(ROOT / case.recipe, case.words, registry, smoke=True)
        assert plan.parallel.degrees.num_data_ranks == point["data_ranks"]
