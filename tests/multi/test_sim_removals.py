"""Waits, casts and copies that a device needs: without any one of them a check on the simulated accelerator fails.

As `test_removals` on the stand-in, but in Paddle's own runtime for devices: the waits are found by the order of
streams, and the casts by kernels of one dtype.
"""

from __future__ import annotations

import json

import pytest

from tests.device.alone import NOT_FOUND
from tests.device.ranks import CHECKS, NUM_RANKS, REMOVALS
from tests.multi.conftest import Runner
from tests.standin.table import ALONE
from tests.support.sim_runs import launch

Found = dict[str, str | None]


@pytest.fixture(scope="module")
def alone(runner: Runner) -> Found:
    """What one process says of the checks of casts, and of each without one."""
    file = runner.directory / "alone"
    code, printed = launch(runner, 1, str(file), "tests.device.alone")
    assert code == 0, printed
    found: Found = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def of_ranks(runner: Runner) -> list[Found]:
    """What each rank says of the checks of messages, and of each without a wait."""
    file = runner.directory / "ranks"
    code, printed = launch(runner, NUM_RANKS, str(file), "tests.device.ranks")
    assert code == 0, printed
    return [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(NUM_RANKS)]


def test_checks_of_one_process_pass(alone: Found) -> None:
    named = {name: wrong for name, wrong in alone.items() if name in {removal.check for removal in ALONE}}
    assert named
    assert set(named.values()) == {None}, named


@pytest.mark.parametrize("removal", [str(removal) for removal in ALONE if removal.text not in NOT_FOUND])
def test_a_missing_cast_is_found(alone: Found, removal: str) -> None:
    assert alone[removal] is not None


@pytest.mark.parametrize("check", CHECKS)
def test_messages_are_in_order(of_ranks: list[Found], check: str) -> None:
    assert [found[check] for found in of_ranks] == [None, None]


@pytest.mark.parametrize("removal", [str(removal) for removal in REMOVALS])
def test_a_missing_wait_is_found(of_ranks: list[Found], removal: str) -> None:
    assert None not in [found[removal] for found in of_ranks]
