"""A training step reads, waits for, uploads, launches, sends and holds no more than `budgets.json` has it."""

from __future__ import annotations

import copy
import json
import os

import pytest

from tests.conftest import PluginSite
from tests.multi.budgets import CASES, TABLE, overdrawn, reports_in
from tests.multi.conftest import Runner
from tests.support.paths import ROOT

BUDGETS = json.loads(TABLE.read_text())
_READER = """
import paddle
from llmsuite.parallel.optimizer import Optimizer

step = Optimizer.step

def step_and_look(self, number):
    step(self, number)
    float(self.shards[0].main_param[0, 0])

Optimizer.step = step_and_look
"""
"""A plugin with a blocking read."""


def test_every_case_has_a_budget() -> None:
    assert list(BUDGETS) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_to_its_budget(runner: Runner, name: str) -> None:
    process = runner.start("rehearse", *CASES[name], "--json")
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    more = "\n".join(overdrawn(reports_in(printed), BUDGETS[name]))
    assert not more, f"{more}\nif it has to be: python -m tests.multi.budgets"


def test_a_planted_read_is_noticed(runner: Runner) -> None:
    site = runner.directory / "planted"
    site.mkdir()
    PluginSite(site).install("planted", _READER)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = runner.start("rehearse", *CASES["dp8"], "--json", LLMSUITE_PLUGINS="planted", PYTHONPATH=path)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    wrong = overdrawn(reports_in(printed), BUDGETS["dp8"])
    most = BUDGETS["dp8"][0]["reads"]
    assert any(line.startswith(f"rank 0: {most + 1} reads, at most {most}: ") for line in wrong), wrong
    assert any(" waits, at most " in line for line in wrong), wrong


@pytest.mark.parametrize("key", ["reads", "waits", "uploads", "messages", "launches", "peak_bytes"])
def test_each_figure_is_held(key: str) -> None:
    rows = [{"count": 3, "place": "parallel/optimizer.py:1"}, {"count": 1, "place": "models/blocks.py:2"}]
    report = {
        **dict.fromkeys(("reads", "waits", "uploads"), rows),
        "rank": 5,
        "messages": [{"count": 4, "name": "all_reduce"}],
        "launches": 4,
        "peak_bytes": 4,
    }
    budget = dict.fromkeys(["reads", "waits", "uploads", "messages", "launches", "peak_bytes"], 4)
    assert overdrawn([report], [budget]) == []
    lower = copy.deepcopy(budget)
    lower[key] = 3
    (line,) = overdrawn([report], [lower])
    assert line.startswith(f"rank 5: 4 {key}, at most 3")
    if key in ("reads", "waits", "uploads"):
        assert line.endswith(": 3 at parallel/optimizer.py:1, 1 at models/blocks.py:2")
