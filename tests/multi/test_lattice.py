"""A few points of the lattice of strategies: every choice and the most dangerous combinations, against one process.

`make parity` runs the whole lattice.
"""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import compare, many_processes, one_process, run_points
from tests.parity.points import Point, short


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all points; what was printed of those that did not end well."""
    return run_points(runner, short())


@pytest.mark.parametrize("point", short(), ids=str)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], point: Point) -> None:
    one = one_process(point).name
    many = many_processes(point).name
    assert one not in failed, failed[one]
    assert many not in failed, failed[many]
    assert compare(runner, one, many).problems == []
