"""Ranks that were lost are started again, unless nothing would be won by it."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmsuite.launch import calls, hang, rendezvous
from llmsuite.launch.ends import INTERRUPTED, REFUSED, End
from llmsuite.launch.launch import launch
from llmsuite.launch.machines import Machines, free_ports
from llmsuite.launch.restarts import Decision, Restarts, is_restarted

KILLED = End(1, "rank 1 was killed by SIGKILL", killed=True)
LOST = End(1, "machine 1 is lost", killed=True, of_machine=True)
CRASHED = End(1, "rank 0 ended with exit code 1")


def _decide(most: int, *losses: tuple[End, int, int]) -> list[Decision]:
    """The decisions after losses, each with the step of the newest checkpoint and the step of the ranks."""
    at = [0]
    restarts = Restarts(most, lambda: at[0])
    found = list[Decision]()
    for end, at[0], step in losses:
        found.append(restarts.after(end, step, sum(d.end is None for d in found)))
    return found


def test_a_loss_is_followed_by_a_restart_and_reported_in_one_line() -> None:
    (found,) = _decide(2, (KILLED, 8, 11))
    assert (found.end, found.count, found.begins_at) == (None, 1, 8)
    assert found.message == "restart 1 of 2, from step 8: rank 1 was killed by SIGKILL"


@pytest.mark.parametrize("code", [0, REFUSED, INTERRUPTED])
def test_what_is_no_loss_is_no_reason(code: int) -> None:
    (found,) = _decide(2, (End(code, "why"), 8, 11))
    assert found == Decision(End(code, "why"), 0)


def test_a_run_that_hangs_is_lost() -> None:
    assert _decide(1, (End(hang.STALLED, "nothing has happened"), 8, 11))[0].end is None


def test_without_the_key_no_restart_is_reported() -> None:
    assert _decide(0, (KILLED, 8, 11)) == [Decision(KILLED, 0)]


def test_the_last_restart_is_the_last() -> None:
    *rest, last = _decide(2, (KILLED, 4, 6), (KILLED, 8, 9), (CRASHED, 12, 14))
    assert [found.count for found in rest] == [1, 2]
    assert last.end == CRASHED
    assert last.message == "no restart is left of 2 (launch.max_restarts): rank 0 ended with exit code 1"


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        ((4, 7), (4, 7), False),  # the step itself ends the ranks
        ((4, 7), (4, 0), False),  # they did not get to a step
        ((4, 7), (4, 5), False),  # nor through one
        ((4, 7), (4, 6), True),  # another accident, on the way
        ((4, 7), (4, 9), True),
        ((4, 7), (8, 8), True),  # a checkpoint was won
        ((0, 0), (0, 0), False),
    ],
)
def test_a_loss_at_the_same_place_ends_the_run_with_the_first(
    first: tuple[int, int], second: tuple[int, int], goes_on: bool
) -> None:
    _, found = _decide(9, (CRASHED, *first), (KILLED, *second))
    assert (found.end is None) == goes_on
    if not goes_on:
        assert found.end == CRASHED
        assert "the first time: rank 0 ended with exit code 1" in found.message


@pytest.mark.parametrize("ends", [(LOST, LOST), (LOST, KILLED), (KILLED, LOST)])
def test_a_machine_may_be_lost_at_the_same_place_by_accident(ends: tuple[End, End]) -> None:
    assert _decide(9, (ends[0], 4, 5), (ends[1], 4, 5))[1].end is None


def test_a_decision_survives_its_way() -> None:
    for sent in (Decision(None, 2, "restart", 8, "why"), Decision(LOST, 1, "no")):
        assert Decision.from_message(sent.as_message()) == sent
    for wrong in (None, [], {}, {"end": None}, {**Decision(None, 1).as_message(), "end": 5}):
        assert Decision.from_message(wrong) is None


# with ranks


def _launch(work: Callable[[], int], directory: Path, most: int = 3, num_ranks: int = 2) -> tuple[int, str]:
    output: list[str] = []

    def newest() -> int:
        return sum(1 for _ in directory.glob("checkpoint-*"))

    code = launch(
        work, num_ranks, directory / "logs", lambda local: {}, output.append, stall_seconds=None,
        restarts=Restarts(most, newest, lambda decision: output.append(f"noted {decision.count}\n")),
    )  # fmt: skip
    return code, "".join(output)


def _rank() -> int:
    return int(os.environ["PADDLE_TRAINER_ID"])


def test_ranks_are_restarted_where_they_can_resume(tmp_path: Path) -> None:
    """Every one of them knows that it begins again, and what the first ones have written stays in the logs."""

    def work() -> int:
        life = len(list(tmp_path.glob("checkpoint-*")))
        print(f"rank {_rank()}, life {life}, restarted {is_restarted()}")
        if _rank() == 1 and life < 2:
            (tmp_path / f"checkpoint-{life}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600 if life < 2 else 0)
        return 0

    code, output = _launch(work, tmp_path)
    lost = f"rank 1 was killed by SIGKILL; its log: {tmp_path}/logs/workerlog.1"
    lines = [line for line in output.splitlines() if not line.startswith("rank 1, life")]
    assert code == 0
    first, second = (f"restart {n} of 3, from step {n}: {lost}" for n in (1, 2))
    assert [line for line in lines if "rank 0, life" not in line] == [lost, first, "noted 1", lost, second, "noted 2"]
    assert lines.count("rank 0, life 2, restarted True") == 1
    lives = [f"rank 1, life {n}, restarted {n > 0}" for n in range(3)]
    assert (tmp_path / "logs" / "workerlog.1").read_text().splitlines() == lives


def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    def work() -> int:
        print("data.train: is missing")
        return REFUSED

    code, output = _launch(work, tmp_path)
    assert code == REFUSED
    assert "restart" not in output


def test_a_crash_that_repeats_ends_with_its_first_error(tmp_path: Path) -> None:
    def work() -> int:
        life = len(list(tmp_path.glob("life-*")))
        (tmp_path / f"life-{life}").touch()
        sys.exit(7 + life)

    code, output = _launch(work, tmp_path, num_ranks=1)
    assert code == 7
    assert len(list(tmp_path.glob("life-*"))) == 2
    assert output.endswith(
        "lost at the same step again, so another restart would not help; the first time: "
        "rank 0 ended with exit code 7; its log: "
        f"{tmp_path}/logs/workerlog.0\n"
    )


def test_ranks_that_hang_are_started_again(tmp_path: Path) -> None:
    """Calls from before the hang are forgotten: another stall may come soon."""

    def work() -> int:
        if is_restarted() and (tmp_path / f"calls.{_rank()}.jsonl").exists():
            return 9
        calls.start()
        for step in range(1, 4):
            calls.step(step)
        if not is_restarted():
            time.sleep(600)
        return 0

    output: list[str] = []
    code = launch(work, 2, tmp_path, lambda local: {}, output.append, None, 0.5, Restarts(1))
    assert code == 0, output
    assert "restart 1 of 1, from step 0: nothing has happened for 0 s (launch.stall_seconds)" in "".join(output)


def test_a_signal_is_no_loss(tmp_path: Path) -> None:
    """Also where a rank fails when it is asked to stop."""
    launcher = os.getpid()

    def work() -> int:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
        (tmp_path / f"ready-{_rank()}").touch()
        if _rank() == 0:
            while not (tmp_path / "ready-1").exists():
                time.sleep(0.01)
            os.kill(launcher, signal.SIGTERM)
        time.sleep(600)
        return 0

    code, output = _launch(work, tmp_path)
    assert code == 5
    assert "restart" not in output


# with machines; here as threads


@pytest.fixture
def pair() -> Iterator[list[Machines]]:
    master = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    launchers = [Machines(index, 2, master, "run") for index in range(2)]
    yield launchers
    for launcher in launchers:
        launcher.close()


def _both(first: Callable[[], object], second: Callable[[], object]) -> tuple[object, object]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        a = pool.submit(first)
        b = pool.submit(second)
        return a.result(30), b.result(30)


def test_machine_0_decides_for_all(pair: list[Machines]) -> None:
    _both(lambda: pair[0].connect(1), lambda: pair[1].connect(1))
    again = Decision(None, 1, "restart 1 of 2", 4, "why")
    no = Decision(KILLED, 0, "not here")
    assert _both(lambda: pair[0].agree(again), lambda: pair[1].agree(no)) == (again, again)


def test_without_machine_0_each_decides(pair: list[Machines]) -> None:
    _both(lambda: pair[0].connect(1), lambda: pair[1].connect(1))
    pair[0].close()
    again = Decision(None, 1, "restart 1 of 2", 4, "why")
    assert pair[1].agree(again) == again


@pytest.mark.parametrize("knows", [0, 1])
def test_a_machine_that_is_new_learns_how_often(pair: list[Machines], knows: int) -> None:
    pair[knows].restarts = 2
    first, second = _both(lambda: pair[0].connect(1), lambda: pair[1].connect(1))
    assert first == second
    assert [machine.restarts for machine in pair] == [2, 2]


def test_launchers_may_connect_again(pair: list[Machines]) -> None:
    found = []
    for _ in range(2):
        found.append(_both(lambda: pair[0].connect(1), lambda: pair[1].connect(1)))
        pair[1].announce(KILLED)
        time.sleep(0.1)
        assert pair[0].poll() == KILLED
        for machine in pair:
            machine.close()
    assert found[0] != found[1]


def test_the_end_of_machine_0_is_that_of_all(pair: list[Machines], tmp_path: Path) -> None:
    """Announced when all have ended, not when the ranks of machine 0 have."""
    output: list[str] = []

    def other() -> bool:
        pair[1].connect(1)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            pair[1].poll()
            time.sleep(0.05)
        early = pair[1].all_ended
        pair[1].announce(End(0, ""))
        while not pair[1].all_ended and time.monotonic() < deadline + 20:
            pair[1].poll()
            time.sleep(0.05)
        return not early and pair[1].all_ended

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(other)
        assert launch(["true"], 1, tmp_path, lambda local: {}, output.append, pair[0], None, Restarts(3)) == 0
        assert found.result(30)


def test_a_machine_that_has_succeeded_waits_for_the_others(pair: list[Machines]) -> None:
    """They may have to begin again, and it with them."""
    _both(lambda: pair[0].connect(1), lambda: pair[1].connect(1))
    pair[1].announce(End(0, ""))
    assert pair[1].poll() is None
    assert not pair[1].all_ended
    assert pair[0].poll() is None
    assert pair[0].all_ended
    pair[0].announce(End(0, ""))
    time.sleep(0.1)
    assert pair[1].poll() is None
    assert pair[1].all_ended


def test_where_no_machine_comes_back_the_loss_ends_the_run(
    pair: list[Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 20.0)
    output: list[str] = []

    def lost_machine() -> None:
        for _ in range(2):  # the second time at the same place, which says nothing of a machine
            pair[1].connect(1)
            pair[1].close()
        monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)

    def stays() -> int:
        return launch(["sleep", "600"], 1, tmp_path, lambda local: {}, output.append, pair[0], None, Restarts(3))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        other = pool.submit(lost_machine)
        code = stays()  # handlers of signals belong to the main thread
        other.result(30)
    assert code == 1
    lost = [f"restart {n} of 3, from step 0: machine 1 is lost" for n in (1, 2)]
    *lines, last = "".join(output).splitlines()
    assert lines == ["machine 1 is lost", lost[0], "machine 1 is lost", lost[1]]
    assert "machines [1] did not connect to" in last
