"""Progress of a run: plain lines when piped, a live line on a terminal, nothing on the other ranks."""

from __future__ import annotations

import io
import re
import sys

import pytest

from llmsuite.base import progress
from llmsuite.base.progress import StepProgress, report, track

METRICS = {
    "loss": 0.693147,
    "rewards/accuracy": 0.5,
    "learning_rate": 1e-5,
    "speed": 0.5,
    "ips_total": 1234.5,
    "unshown": 1.0,
}
SHOWN = ("loss", "learning_rate", "rewards/accuracy", "absent")


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is set."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_logged_step_is_a_plain_line(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    line = StepProgress(10, 1, SHOWN)
    clock[0] += 6
    line.step(2, METRICS)
    line.close()
    assert capsys.readouterr().out == (
        "step 2/10  loss 0.6931  learning_rate 1e-05  accuracy 0.5  0.5 step/s  1234 tokens/s  left 00:00:24\n"
    )


@pytest.mark.parametrize(
    ("seconds_a_step", "left"),
    [(1, "00:00:50"), (100, "01:23:20"), (1727, "23:59:10"), (3600, "50:00:00"), (36000, "500:00:00"), (0, "00:00:00")],
)
def test_the_time_left(
    seconds_a_step: float, left: str, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    line = StepProgress(60, 1, ())
    clock[0] += 10 * seconds_a_step
    line.step(10, METRICS)
    assert capsys.readouterr().out.endswith(f"left {left}\n")


def test_the_time_left_counts_the_steps_of_this_run_only(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    line = StepProgress(100, 91, ())  # resumed after step 90
    clock[0] += 5
    line.step(95, METRICS)
    assert capsys.readouterr().out.endswith("left 00:00:05\n")


def test_a_step_that_is_not_logged_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = StepProgress(10, 1, SHOWN)
    line.step(1, None)
    line.close()
    assert capsys.readouterr().out == ""


def test_report_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    report("saved")
    assert capsys.readouterr().out == "saved\n"


def test_track_says_something_every_few_seconds(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    seen = []
    for item in track([5, 6, 7, 8], "reading"):
        seen.append(item)
        clock[0] += 3
    assert seen == [5, 6, 7, 8]
    assert capsys.readouterr().out == "reading: 2/4\nreading: 4/4\n"


def test_track_takes_what_has_no_length(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    for _ in track(iter([1, 2]), "reading"):
        clock[0] += 6
    assert capsys.readouterr().out == "reading: 1/?\nreading: 2/?\n"
    assert list(track([], "reading")) == []


def test_a_quick_loop_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(1000), "reading")) == list(range(1000))
    assert capsys.readouterr().out == ""


def test_the_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    report("saved")
    line = StepProgress(10, 1, SHOWN)
    line.step(1, METRICS)
    line.close()
    seen = []
    for item in track([1, 2], "reading"):
        seen.append(item)
        clock[0] += 60
    assert seen == [1, 2]
    assert capsys.readouterr().out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From within a test: pytest sets sys.stdout again after its fixtures."""
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stdout", shown)
    return shown


def test_a_terminal_has_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    line = StepProgress(10, 1, SHOWN)
    for step in range(1, 11):
        line.step(step, METRICS if step % 2 == 0 else None)
    line.close()
    text = terminal.getvalue()
    assert "10/10" in text
    assert "loss 0.6931" in text
    assert "\x1b" in text, "it is updated in place"
    assert "left" not in text


def test_a_terminal_has_a_bar_for_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    assert list(track([1, 2, 3], "reading")) == [1, 2, 3]
    assert "reading" in terminal.getvalue()


def test_a_terminal_of_another_rank_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = a_terminal(monkeypatch)
    monkeypatch.setenv("PADDLE_TRAINER_ID", "3")
    line = StepProgress(10, 1, SHOWN)
    line.step(1, METRICS)
    line.close()
    assert list(track([1, 2, 3], "reading")) == [1, 2, 3]
    report("saved")
    assert terminal.getvalue() == ""


def test_a_narrow_terminal_has_a_line_for_each_logged_step_above_one_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    shown_names = ("loss", "learning_rate", "grad_norm", "rewards/margin", "rewards/accuracy")
    metrics = {**METRICS, "grad_norm": 123.45, "rewards/margin": 0.01234, "reward": 1.0}
    line = StepProgress(1000, 1, shown_names)
    for step in (511, 512):
        line.step(step, metrics)
    line.close()
    shown = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    rows = [part for row in shown.split("\n") for part in row.split("\r")]
    assert max(map(len, rows)) <= 80
    for step in (511, 512):
        text = f"step {step}  loss 0.6931  lr 1e-05  grad_norm 123.5  margin 0.01234  accuracy 0.5"
        assert [row.rstrip() for row in rows].count(text) == 1
    (bar,) = {row.strip() for row in rows if "512/1000" in row}
    assert "0.5 step/s  1234 tokens/s" in bar
