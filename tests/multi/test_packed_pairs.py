"""Pairs packed, on any mesh: the same run as pairs in rows of their own, in one process.

A step takes all rows of the file, so that it learns from the same ones however many samples they are packed into.
`tests/parity/test_packed_pairs.py` has each stage on every mesh; here each is on one.
"""

from __future__ import annotations

import pytest

from tests.multi.conftest import Runner
from tests.support.packed_pair_runs import check, run_points

POINTS = [("dpo", "pp2"), ("rm", "tp2")]


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all points; what was printed of those that did not end well."""
    return run_points(runner, POINTS)


@pytest.mark.parametrize(("stage", "spread"), POINTS)
def test_equals_rows_of_their_own(runner: Runner, failed: dict[str, str], stage: str, spread: str) -> None:
    check(runner, failed, stage, spread)
