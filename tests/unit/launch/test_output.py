"""A run continues when the reader of its output has ended, and ends with a checkpoint when its terminal does."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.engine.stop import StopRequest
from llmsuite.launch.output import Output
from llmsuite.launch.ranks import is_repeated, stop_signals

_PRINTS = """
import sys
from llmsuite.launch.output import tolerant_output
with tolerant_output():
    for number in range(5000):
        print("a line of some length, so that buffers are full at some time", flush=number % 2 == 0)
        print("another", file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


def test_output_without_a_reader_is_lost_and_no_more(tmp_path: Path) -> None:
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
    monkeypatch.setattr(sys, "stdout", Output(io.BufferedWriter(_Interrupted()), False, line_buffering=True))
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


_OWN = """
import hashlib, sys
from pathlib import Path
from llmsuite.launch.interrupts import own_process
from llmsuite.engine.stop import StopRequest
own_process()
noted = Path(sys.argv[1])
with StopRequest(lambda: noted.write_text("stopped")) as stop:
    print("ready", flush=True)
    if sys.argv[2] == "in an operation":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    while True:
        pass
"""


@pytest.mark.parametrize("where", ["in an operation", "in Python"])
def test_a_second_signal_ends_a_process_wherever_it_is(tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-c", _OWN, str(tmp_path / "noted"), where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two that arrive together count as one
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in printed
    assert (tmp_path / "noted").read_text() == "stopped"


def test_a_process_of_another_program_gets_an_exception() -> None:
    with StopRequest(lambda: pytest.fail("it is not ended")) as stop:
        signal.raise_signal(signal.SIGINT)
        assert not stop.is_repeated
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.is_repeated


def test_which_signals_are_a_second_one() -> None:
    hup = signal.SIGHUP
    term = signal.SIGTERM
    assert [is_repeated(numbers) for numbers in ([], [term], [hup, hup], [term, hup])] == [False] * 4
    assert [is_repeated(numbers) for numbers in ([term, term], [hup, term], [hup, hup, term])] == [True] * 3
