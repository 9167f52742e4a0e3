"""A full disk of the logs or of temporary files is reported, and does not end a run."""

from __future__ import annotations

import collections
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.launch import calls, hang
from llmsuite.launch.launch import launch

Usage = collections.namedtuple("Usage", "total used free")


def _print() -> int:
    if os.environ["PADDLE_TRAINER_ID"] == "1":
        full = os.open("/dev/full", os.O_WRONLY)  # its log, from now on
        for stream in (1, 2):
            os.dup2(full, stream)
    for number in range(3000):  # more than any buffer keeps
        print("a line of rank", os.environ["PADDLE_TRAINER_ID"], number)
    print("and an error", file=sys.stderr, flush=True)
    return 0


def test_a_rank_whose_log_has_no_room_continues(tmp_path: Path) -> None:
    output: list[str] = []
    assert launch(_print, 2, tmp_path, lambda local: {}, output.append) == 0, "".join(output)
    assert "a line of rank 0 2999\n" in "".join(output)


def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 0))
    output: list[str] = []
    assert launch(["sleep", "0.5"], 1, tmp_path, lambda local: {}, output.append) == 0
    line = f"{tmp_path}: its disk is full; output of ranks from here on may be lost\n"
    assert [text for text in output if text] == [line]


@pytest.mark.parametrize(("code", "end"), [(0, ""), (1, "rank 1 ended with"), (hang.STALLED, "nothing has happened")])
def test_deleted_logs_end_no_run(tmp_path: Path, code: int, end: str) -> None:
    logs = tmp_path / "logs"

    def work() -> int:
        calls.start()
        for step in range(1, 4):
            calls.step(step)
        if os.environ["PADDLE_TRAINER_ID"] == "1":
            shutil.rmtree(logs)
            time.sleep(0.5)
            return 1 if code == 1 else 0
        time.sleep(600 if code == hang.STALLED else 1.5)
        return 0

    output: list[str] = []
    stall_seconds = 2.0 if code == hang.STALLED else None
    assert launch(work, 2, logs, lambda local: {}, output.append, stall_seconds=stall_seconds) == code
    assert end in "".join(output)


def test_a_stall_is_explained_without_room_for_the_calls(tmp_path: Path) -> None:
    (tmp_path / "calls.0.jsonl").mkdir()
    output: list[str] = []

    def work() -> int:
        calls.start()
        for step in range(1, 4):
            calls.step(step)
        time.sleep(600)
        return 0

    assert launch(work, 1, tmp_path, lambda local: {}, output.append, None, 0.5) == hang.STALLED
    text = "".join(output)
    assert (
        f"{tmp_path}/calls.0.jsonl: cannot be written: Is a directory; the last calls of ranks are not all there"
        in text
    )
    assert "nothing has happened for" in text


def test_logs_that_cannot_be_made_are_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(UserError, match="logs: cannot be written: File exists"):
        launch(["true"], 1, tmp_path / "logs", lambda local: {}, print)
    (tmp_path / "workerlog.0").mkdir()
    with pytest.raises(UserError, match=r"workerlog.0: cannot be written: Is a directory"):
        launch(["true"], 1, tmp_path, lambda local: {}, print)


def test_calls_have_their_room_from_the_beginning(tmp_path: Path) -> None:
    """Memory of a file with holes ends the process by SIGBUS where there is no room for them."""
    calls.CallLog(tmp_path / "0.calls")
    found = (tmp_path / "0.calls").stat()
    assert found.st_blocks * 512 >= found.st_size
    with pytest.raises(UserError, match=r"cannot be written: .*; set TMPDIR to a disk that has room"):
        calls.CallLog(Path("/dev/full"))
