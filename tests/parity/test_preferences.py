"""Every stage of `tests/multi/test_preferences.py` on every mesh of it."""

from __future__ import annotations

import itertools

import pytest

from tests.multi.conftest import Runner
from tests.support.preference_runs import SPREADS, STAGES, check, run_points

POINTS = list(itertools.product(STAGES, SPREADS))


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all points; what was printed of those that did not end well."""
    return run_points(runner, POINTS)


@pytest.mark.parametrize(("stage", "spread"), POINTS)
def test_equals_one_process(runner: Runner, failed: dict[str, str], stage: str, spread: str) -> None:
    check(runner, failed, stage, spread)
