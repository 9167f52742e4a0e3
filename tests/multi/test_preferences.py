"""Reward models, KTO, losses of DPO that depend on the whole batch, and distillation: on any mesh equal to one process.

`tests/parity/test_preferences.py` has each stage on every mesh; here each is on two.
"""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.support.preference_runs import check, run_points

POINTS = [
    ("rm", "tp2"),
    ("rm, adapters", "stage3"),
    ("kto", "pp2"),
    ("kto", "dp2"),
    ("orpo", "dp2"),
    ("orpo", "static"),
    ("gkd", "dp2"),
    ("gkd", "tp2"),
    ("gkd", "pp2"),
    ("gkd", "stage3"),
    ("gkd, sft", "tp2"),
    ("gkd, adapters", "tp2"),
]


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all points; what was printed of those that did not end well."""
    return run_points(runner, POINTS)


@pytest.mark.parametrize(("stage", "spread"), POINTS)
def test_equals_one_process(runner: Runner, failed: dict[str, str], stage: str, spread: str) -> None:
    check(runner, failed, stage, spread)
