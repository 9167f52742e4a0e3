"""A run goes on when nobody reads what it prints, and ends with a checkpoint when its terminal does."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.launch.output import Output
from llmsuite.launch.ranks import stop_signals
from llmsuite.train.stop import StopRequest

_PRINTS = """
import sys
from llmsuite.launch.output import lasting_output
with lasting_output():
    for number in range(5000):
        print("a line of some length, so that buffers are full at some time", flush=number % 2 == 0)
        print("another", file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


def test_what_nobody_reads_is_lost_and_no_more(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = tmp_path / "done"
    command = [sys.executable, "-c", _PRINTS, str(done)]
    assert subprocess.run(command, stdout=writing, stderr=writing, check=False).returncode == 0
    os.close(writing)
    assert done.read_text() == "done"


@pytest.fixture
def terminal() -> Iterator[None]:
    """The end of a terminal ends this process, also where the tests themselves run under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("terminal")
def test_the_end_of_a_terminal_stops_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # of the shell, too
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().out.count("stopping") == 1


class _Interrupted(io.RawIOBase):
    """A pipe whose reader presses Ctrl-C as soon as a line is there."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if b"step" in bytes(data):
            signal.raise_signal(signal.SIGINT)
        return len(data)


def test_a_signal_while_a_line_is_written_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Output(io.BufferedWriter(_Interrupted()), line_buffering=True))
    with StopRequest() as stop:
        print("step 3")
        assert stop.requested()


@pytest.mark.usefixtures("terminal")
def test_nohup_is_heeded() -> None:
    assert signal.SIGHUP in stop_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested()
