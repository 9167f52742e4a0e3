"""benchmarks/scaling.py: what ranks have counted is put together, held against the plan, and told."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        return importlib.import_module("scaling")


def _record(scaling: ModuleType, plan: tuple[Any, Any], seconds: float) -> dict[str, Any]:
    """What a rank would leave that has done as planned."""
    sent, held = plan
    between = held.parameters + held.pieces + held.moments
    return {
        "seconds": [seconds, 9.0, seconds],
        "cpu_seconds": [seconds / 2, 9.0, seconds / 2],
        "held": {**dataclasses.asdict(held), "between_steps": between},
        "sent": [[operation, list(shape), width, count] for (operation, shape, width), count in sent.items()],
    }


def _runs(scaling: ModuleType, registry: Registry) -> dict[tuple[int, str], Any]:
    """Runs of 1 and 2 ranks by every strategy, as planned."""
    found = {}
    for num_ranks in (1, 2):
        for name, parallel in scaling.strategies(num_ranks).items():
            plan = plan_run(scaling.RECIPE, scaling.words(num_ranks, parallel, 1), registry, smoke=True)
            ranks = scaling.planned_ranks(plan)
            records = [_record(scaling, planned, 1.0 + rank) for rank, planned in enumerate(ranks)]
            found[num_ranks, name] = scaling.measured(records, ranks)
    return found


def test_what_is_as_planned_is_told(scaling: ModuleType, registry: Registry) -> None:
    runs = _runs(scaling, registry)
    assert [run.problems for run in runs.values()] == [[]] * 7
    assert scaling.not_divided(runs) == []
    assert runs[2, "data parallel"].seconds == 2.0, "the slower rank's"
    assert runs[2, "data parallel"].cpu_seconds == 1.5, "both ranks'"
    one = scaling.table_of_steps(runs)[2]
    table = scaling.table_of_memory(runs)
    assert one == "| 1 | one rank | 1.00 | 1.00 | 0.50 | 1.00 | 0.000 | 0.000 |"
    assert len({line.count("|") for line in scaling.table_of_steps(runs)}) == 1
    parts = {name: line.split("|")[-2].strip() for (_, name), line in zip(runs, table[2:])}
    # of parameters, gradients and two moments: half the moments and a piece; half the gradients too; half of all
    assert [parts[name] for name in scaling.CUT] == ["0.875", "0.750", "0.500"]


def test_what_is_not_as_planned_is_named(scaling: ModuleType) -> None:
    held = scaling.Held(parameters=100, pieces=0, moments=200, gradients=100)
    sent = collections.Counter({("all_reduce", (25,), 4): 2})
    record = _record(scaling, (sent, held), 1.0)
    record["sent"] = [["all_reduce", [25], 4, 1], ["send", [3], 8, 1]]
    record["held"] |= {"moments": 208, "gradients": 110, "between_steps": 304}
    found = scaling.measured([record], [(sent, held)])
    assert found.problems == [
        "rank 0 has sent 1, not 2, times ('all_reduce', (25,), 4)",
        "rank 0 has sent 1, not 0, times ('send', (3,), 8)",
        "rank 0 has 208 bytes of moments, not 200",
        "rank 0: the allocator has 110 bytes of gradients, not 100",
    ]
    assert (found.sent, found.planned_sent) == ([124], [200])


def test_what_sharding_does_not_divide_is_named(scaling: ModuleType) -> None:
    def run(**changed: int) -> Any:
        whole = {"parameters": 100, "pieces": 0, "moments": 200, "gradients": 100}
        held = scaling.Held(**{**whole, **changed})
        return scaling.Measured(1.0, 1.0, [0], [0], [held], [held], [])

    found = {(1, scaling.ALONE): run(), (4, "stage 1"): run(moments=50, pieces=25)}
    assert scaling.not_divided(found) == []
    found[4, "stage 2"] = run(moments=50, pieces=25)
    assert set(scaling.not_divided(found)) == {"stage 2 on 4 ranks: 100 bytes of gradients, not 25"}


def test_starts_are_told_by_their_median(scaling: ModuleType) -> None:
    lines = scaling.table_of_starts([scaling.Start(8, "pipeline", [9.0, 5.0, 6.0], [3.0, 2.0, 1.0])])
    assert lines[2:] == ["| 8 | pipeline | 6.0 (5.0 to 9.0) | 2.0 |"]
