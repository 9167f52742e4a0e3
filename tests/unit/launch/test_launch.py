"""Ranks that are forks of the launcher: their environment, and the report of their end."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.launch.ends import INTERRUPTED, End
from llmsuite.launch.launch import _explain, launch
from llmsuite.launch.machines import Machines


def _launch(work: Callable[[], int], directory: Path, num_ranks: int = 2) -> tuple[int, str]:
    output: list[str] = []
    code = launch(work, num_ranks, directory, lambda local: {"LOCAL": str(local)}, output.append)
    return code, "".join(output)


def _rank() -> int:
    return int(os.environ["PADDLE_TRAINER_ID"])


def test_each_rank_has_its_environment_and_its_log(tmp_path: Path) -> None:
    here = os.getpid()

    def work() -> int:
        print(f"rank {_rank()} of {os.environ['PADDLE_TRAINERS_NUM']}, {os.environ['LOCAL']}")
        print("ä", file=sys.stderr)
        os.system("echo by a process of its own")
        return int(os.getppid() != here or os.getsid(0) != os.getpid())

    assert _launch(work, tmp_path) == (0, "rank 0 of 2, 0\nä\nby a process of its own\n")
    assert (tmp_path / "workerlog.1").read_text() == "rank 1 of 2, 1\nä\nby a process of its own\n"
    assert "PADDLE_TRAINER_ID" not in os.environ


def test_variables_of_a_rank_override_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL", "of the shell")
    assert _launch(lambda: print(os.environ["LOCAL"]) or 0, tmp_path, 1) == (0, "0\n")


def test_a_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    def work() -> int:
        if _rank() == 0:
            time.sleep(600)
        print("no room left")
        return 2

    code, output = _launch(work, tmp_path)
    assert code == 2
    assert output == f"no room left\nrank 1 ended with exit code 2; its log: {tmp_path}/workerlog.1\n"


def test_an_exception_of_a_rank_is_in_its_log(tmp_path: Path) -> None:
    def work() -> int:
        raise ZeroDivisionError("by nothing")

    code, output = _launch(work, tmp_path, 1)
    assert code == 1
    assert "ZeroDivisionError: by nothing" in output


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    def work() -> int:
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        return 0

    code, output = _launch(work, tmp_path)
    assert code == 1
    assert "rank 1 was killed by SIGKILL" in output


def test_how_a_rank_fails_because_another_was_killed_is_in_its_log_alone(tmp_path: Path) -> None:
    def work() -> int:
        if _rank() == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        print("works", flush=True)
        while not _is_dead(tmp_path / "pid"):
            time.sleep(0.01)
        raise ConnectionResetError("the other rank is gone")

    code, output = _launch(work, tmp_path)
    assert code == 1
    last = f"rank 1 was killed by SIGKILL; its log: {tmp_path}/workerlog.1\n"
    assert output in (last, f"works\n{last}")
    assert "ConnectionResetError" in (tmp_path / "workerlog.0").read_text()


def _is_dead(path: Path) -> bool:
    """True where the process whose number is in a file has ended, whether or not its parent has waited for it."""
    number = path.read_text() if path.exists() else ""
    if not number:
        return False
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all(tmp_path: Path, number: signal.Signals) -> None:
    launcher = os.getpid()

    def work() -> int:
        got: list[int] = []
        signal.signal(number, lambda n, frame: got.append(n))
        (tmp_path / f"ready-{_rank()}").touch()
        if _rank() == 0:
            while not (tmp_path / "ready-1").exists():
                time.sleep(0.01)
            os.kill(launcher, number)
        while not got:
            time.sleep(0.01)
        (tmp_path / f"signalled-{_rank()}").touch()
        return INTERRUPTED

    assert _launch(work, tmp_path)[0] == INTERRUPTED
    assert (tmp_path / "signalled-0").exists()
    assert (tmp_path / "signalled-1").exists()


def test_a_second_signal_ends_ranks_that_get_one(tmp_path: Path) -> None:
    launcher = os.getpid()

    def work() -> int:
        got: list[int] = []

        def handle(number: int, frame: object) -> None:
            got.append(number)
            (tmp_path / f"{_rank()} got {len(got)}").touch()

        signal.signal(signal.SIGINT, handle)
        (tmp_path / f"{_rank()} ready").touch()
        while _rank() == 0:
            if (tmp_path / "1 ready").exists():
                os.kill(launcher, signal.SIGINT)
                while not (tmp_path / "1 got 1").exists():
                    time.sleep(0.01)
            time.sleep(0.01)
        time.sleep(600)
        return 0

    assert _launch(work, tmp_path) == (INTERRUPTED, "")
    assert {path.name for path in tmp_path.glob("* got *")} == {"0 got 1", "1 got 1"}


def test_a_rank_without_handlers_ends_by_a_signal(tmp_path: Path) -> None:
    """However long an operation takes that it is in, and whatever would become of an exception there."""
    launcher = os.getpid()

    def work() -> int:
        if _rank() == 0:
            os.kill(launcher, signal.SIGINT)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        return 0

    assert _launch(work, tmp_path) == (INTERRUPTED, "")


def test_what_is_printed_about_a_rank_that_a_signal_ended_is_left_out(tmp_path: Path) -> None:
    launcher = os.getpid()

    def work() -> int:
        if _rank() == 1:
            (tmp_path / "pid.new").write_text(str(os.getpid()))
            (tmp_path / "pid.new").rename(tmp_path / "pid")
            time.sleep(600)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(launcher, signal.SIGINT)
        other = (tmp_path / "pid").read_text()
        while (status := Path(f"/proc/{other}/stat")).exists() and status.read_text().rpartition(")")[2].split()[
            0
        ] != "Z":
            time.sleep(0.001)
        raise ConnectionResetError("the other rank is gone")

    assert _launch(work, tmp_path) == (INTERRUPTED, "")
    assert "the other rank is gone" in (tmp_path / "workerlog.0").read_text()


def test_ranks_that_fail_together_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("")
    (tmp_path / "workerlog.1").write_text("the reason\n")
    output: list[str] = []
    end = _explain(0, {0: 1, 1: 1}, tmp_path, output.append, Machines())
    first, second = (f"rank {rank} ended with exit code 1; its log: {tmp_path}/workerlog.{rank}" for rank in (0, 1))
    assert "".join(output) == f"{first}\nthe reason\n{second}\n"
    assert end == End(1, first)


def test_output_shared_by_ranks_is_printed_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"workerlog.{rank}").write_text("data.train: is missing\n")
    output: list[str] = []
    _explain(0, {1: 2}, tmp_path, output.append, Machines())
    assert "".join(output) == f"rank 1 ended with exit code 2; its log: {tmp_path}/workerlog.1\n"


def test_a_good_message_is_not_buried(tmp_path: Path) -> None:
    """The neighbours of a rank that refuses fail too, even before it has ended."""

    def work() -> int:
        if _rank() == 1:
            time.sleep(0.3)
            print("data.train: is missing")
            return 2
        raise ConnectionError("a peer is gone")

    code, output = _launch(work, tmp_path, 3)
    assert code == 2
    assert output.endswith(f"data.train: is missing\nrank 1 ended with exit code 2; its log: {tmp_path}/workerlog.1\n")
    assert "rank 2" not in output


@pytest.mark.parametrize("obeys", [True, False])
def test_a_stopped_rank_does_not_keep_the_run_from_ending(
    tmp_path: Path, obeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsuite.launch.launch.GRACE_SECONDS", 0.5)
    launcher = os.getpid()

    def work() -> int:
        if _rank() == 1:
            signal.signal(signal.SIGTERM, lambda n, frame: sys.exit(INTERRUPTED))
            while True:
                os.kill(os.getpid(), signal.SIGSTOP)
                if obeys:
                    time.sleep(600)
        signal.signal(signal.SIGTERM, lambda n, frame: None)  # it waits for its neighbour
        time.sleep(0.5)
        os.kill(launcher, signal.SIGTERM)
        time.sleep(600)
        return 0

    code, output = _launch(work, tmp_path)
    assert code == INTERRUPTED
    assert output == "stopped ranks are continued, so that the run can end: 1\n"
