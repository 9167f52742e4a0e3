"""Machines that make up a run after others were lost."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.launch import rendezvous
from llmsuite.launch.ends import End
from llmsuite.launch.launch import launch
from llmsuite.launch.machines import Machines, free_ports
from llmsuite.launch.membership import Membership
from llmsuite.launch.ranks import Work
from llmsuite.launch.restarts import Decision, Restarts

LATE = rendezvous.SILENT_SECONDS + 1


def _only_even(count: int) -> Work:
    if count % 2:
        raise UserError("the batch cannot be divided")
    return ["true"]


@pytest.mark.parametrize(
    ("membership", "present", "assigned"),
    [
        (Membership(3, 1), {0, 1, 2, 3}, [0, 1, 2]),
        (Membership(3, 1), {0, 2, 3}, [0, 3, 2]),  # who stays keeps its place
        (Membership(3, 2), {0, 3, 4}, [0, 3, 4]),
        (Membership(3, 1), {0, 3}, []),
        (Membership(3, 1, 2, 1.0, _only_even), {0, 3}, [0, 3]),
        (Membership(4, 0, 1, 1.0, _only_even), {0, 2, 3}, [0, 2]),  # three could not be used
        (Membership(4, 0, 3, 1.0, _only_even), {0, 2, 3}, []),
        (Membership(2, 0, 1, 1.0, _only_even), {0}, []),
    ],
)
def test_assignment_of_machines_to_node_ranks(membership: Membership, present: set[int], assigned: list[int]) -> None:
    assert membership.assign(present) == assigned


def test_a_machine_that_was_not_lost_is_waited_for() -> None:
    """A spare may be back before a machine whose rank alone was lost."""
    membership = Membership(3, 1)
    assert not membership.is_enough(3, True, 1.0)
    assert membership.is_enough(3, False, 1.0)
    assert membership.is_enough(3, True, LATE)
    assert not membership.is_enough(2, False, LATE)


def test_fewer_machines_are_enough_once_none_comes_back() -> None:
    membership = Membership(4, 0, 2, 5.0, _only_even)
    assert not membership.is_enough(3, False, 4.0)
    assert membership.is_enough(3, False, 5.0)
    assert not membership.is_enough(1, False, LATE)


# with machines; here as threads


@pytest.fixture
def four() -> Iterator[list[Machines]]:
    """Three machines that may be two, and a spare."""
    master = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    membership = Membership(3, 1, 2, 0.5, lambda count: ["true"])
    launchers = [Machines(number, 3, master, "run", membership) for number in range(4)]
    yield launchers
    for launcher in launchers:
        launcher.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 20.0)


def _meet(launchers: list[Machines], *later: Machines) -> list[list[str]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [pool.submit(m.connect, 1) for m in launchers]
        if later:
            time.sleep(2.0)
        found += [pool.submit(m.connect, 1) for m in later]
        return [f.result(30) for f in found]


def _lose(launchers: list[Machines], number: int) -> list[Machines]:
    """Lose a machine; returns the others, which have agreed on a restart."""
    launchers[number].close()
    others = [launcher for launcher in launchers if launcher is not launchers[number]]
    deadline = time.monotonic() + 20
    while None in [launcher.poll() for launcher in others] and time.monotonic() < deadline:
        time.sleep(0.02)
    for launcher in others:
        launcher.restarts += 1
        launcher.close()
    return others


def test_a_spare_takes_the_place_of_a_lost_machine_and_then_they_are_fewer(four: list[Machines]) -> None:
    assert len(_meet(four)[3]) == 4  # a store and three ranks
    assert [m.numbers for m in four] == [[0, 1, 2]] * 4
    assert [m.index for m in four] == [0, 1, 2, -1]
    left = _lose(four, 1)
    assert len({tuple(found) for found in _meet(left)}) == 1
    assert [m.index for m in left] == [0, 2, 1]
    assert left[0].membership.describe(left[0].numbers) == "the run continues with machines 0, 3, 2"
    left = _lose(left, 2)
    assert len(_meet(left)[0]) == 3
    assert [m.numbers for m in left] == [[0, 2]] * 2
    assert left[0].membership.describe(left[0].numbers) == "the run continues with 2 of 3 machines: 0, 2"


def test_the_loss_of_a_spare_does_not_end_the_run(four: list[Machines], capfd: pytest.CaptureFixture[str]) -> None:
    _meet(four)
    four[3].close()
    deadline = time.monotonic() + 20
    while "spare" not in capfd.readouterr().err and time.monotonic() < deadline:
        assert [m.poll() for m in four[:3]] == [None] * 3
        time.sleep(0.02)
    assert time.monotonic() < deadline
    for launcher in four[1:3]:
        launcher.announce(End(0, ""))
    time.sleep(0.1)
    assert four[0].poll() is None
    assert four[0].all_ended


def test_a_machine_that_comes_back_has_its_place_again(four: list[Machines]) -> None:
    _meet(four)
    left = _lose(four, 1)
    _meet(left)
    for launcher in left:
        launcher.close()
    again = Machines(1, 3, four[0]._master, "run", four[0].membership)
    _meet([left[0], again], *left[1:])
    assert left[0].numbers == [0, 1, 2]
    assert again.restarts == 1
    again.close()


@pytest.mark.parametrize("code", [0, 7])
def test_a_spare_ends_as_the_run_does(four: list[Machines], tmp_path: Path, code: int) -> None:
    output: list[str] = []
    end = End(code, "rank 1 on machine 1 ended with exit code 7" if code else "")

    def others() -> None:
        _meet(four[:3])
        time.sleep(0.3)
        four[0].announce(end)
        four[0].agree(Decision(end, 0))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(others)
        assert launch(["false"], 1, tmp_path, lambda local: {}, output.append, four[3], None, Restarts(1)) == code
        found.result(20)
    assert output[0] == "machine 3 is a spare\n"
    assert not list(tmp_path.glob("workerlog.*"))
