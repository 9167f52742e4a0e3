"""A supervised command ends with all that it has started, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from llmsuite.base.supervisor import SupervisedProcess

_MARK = "KEPT_BY_TEST"
_DESCENDANTS = {
    "child": "subprocess.Popen(['sleep', '600'])",
    "fork": "os.fork() or time.sleep(600)",
    "session": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "orphan of its own session": "os.fork() or (os.setsid(), os.fork(), time.sleep(600))",
    "that heeds no signal": "os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600))",
    "many": "[subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600']) for _ in range(8)]",
}
_ENDS = {"on its own": ("", 0), "with a code": ("sys.exit(3)", 3), "by a signal": ("os.kill(os.getpid(), 11)", -11)}
_IMPORTS = "import os, signal, subprocess, sys, time; "


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of a variable in the environment of all that is started."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(_MARK, value)
    return value


def _alive(mark: str, least: int = 0) -> list[int]:
    """Processes other than this one that have the mark; waits until there are at least `least`."""
    deadline = time.monotonic() + 60
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if int(path.parent.name) != os.getpid() and f"{_MARK}={mark}".encode() in path.read_bytes().split(
                    b"\0"
                ):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        if len(found) >= least:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def _supervised(code: str, **more: object) -> SupervisedProcess:
    return SupervisedProcess([sys.executable, "-S", "-c", _IMPORTS + code], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("started", _DESCENDANTS.values(), ids=_DESCENDANTS)
@pytest.mark.parametrize(("ends", "code"), _ENDS.values(), ids=_ENDS)
def test_nothing_is_left_of_what_has_ended(mark: str, started: str, ends: str, code: int) -> None:
    supervised = _supervised(f"own = os.getpid(); {started}; os.getpid() == own and ({ends or None})")
    assert supervised.wait(60) == code
    assert _alive(mark) == []
    supervised.end()


@pytest.mark.parametrize("started", _DESCENDANTS.values(), ids=_DESCENDANTS)
def test_nothing_is_left_of_what_is_ended(mark: str, started: str) -> None:
    supervised = _supervised(f"{started}; time.sleep(600)")
    _alive(mark, 3)  # the supervisor, the command, what it has started
    assert supervised.poll() is None
    supervised.end()
    assert _alive(mark) == []
    supervised.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_who_has_started_it_is_killed(mark: str, number: int) -> None:
    code = "from llmsuite.base.supervisor import SupervisedProcess; import time; "
    code += "kept = SupervisedProcess(['sh', '-c', 'sleep 600 & sleep 600']); time.sleep(600)"
    starter = subprocess.Popen([sys.executable, "-c", code])
    _alive(mark, 4)
    starter.send_signal(number)
    starter.wait()
    deadline = time.monotonic() + 30
    while left := _alive(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_command_may_end_on_its_own_within_its_grace_period(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: (print('ends', flush=True), sys.exit(5))); "
    code += "print('is here', flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with open(log, "wb") as file:
        supervised = _supervised(code, output=file, grace_seconds=60.0)
    _wait_for(log, "is here\n")
    supervised.end()
    assert supervised.poll() == 5
    assert log.read_text() == "is here\nends\n"


@pytest.mark.parametrize(("act", "code"), [("interrupt", 7), ("terminate", 8), ("kill", -signal.SIGKILL)])
def test_a_signal_is_for_the_command(act: str, code: int, mark: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        supervised = _supervised(
            "signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); "
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(8)); "
            f"{_DESCENDANTS['session']}; print('is here', flush=True); time.sleep(600)",
            output=file,
            grace_seconds=600.0,
        )
    _wait_for(log, "is here\n")
    getattr(supervised, act)()
    assert supervised.wait(60) == code
    assert _alive(mark) == []
    supervised.end()


@pytest.mark.parametrize(("act", "number"), [("interrupt", signal.SIGINT), ("kill", signal.SIGKILL)])
def test_a_signal_right_after_the_start_is_for_the_command_too(act: str, number: int, mark: str) -> None:
    for _ in range(10):
        supervised = SupervisedProcess(["sleep", "600"], grace_seconds=600.0)
        getattr(supervised, act)()
        assert supervised.wait(60) == -number
        assert _alive(mark) == []
        supervised.end()


def _wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while log.read_text() != text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_it_prints_has_a_bound(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        supervised = _supervised(
            "sys.stdout.write('x' * 3_000_000); os.write(2, b'y'); sys.exit(4)", output=file, max_output_bytes=1000
        )
    assert supervised.wait(60) == 4
    supervised.end()
    assert log.read_text() == "x" * 1000 + "\n[what this process prints from here on is left out]\n"


def test_all_that_it_prints_comes_through(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        supervised = _supervised("sys.stdout.write('x' * 3_000_000)", output=file)
    assert supervised.wait(60) == 0
    supervised.end()
    assert log.stat().st_size == 3_000_000


_TAKES = "more = bytearray(120 << 20)"


@pytest.mark.parametrize(
    ("code", "too_much"),
    [
        (f"{_TAKES}; time.sleep(600)", True),
        (f"subprocess.Popen([sys.executable, '-c', 'import time; {_TAKES}; time.sleep(600)']); time.sleep(600)", True),
        # together: forks that have as much each, written to after they were made
        ("[os.fork() for _ in range(2)]; more = bytearray(40 << 20); time.sleep(600)", True),
        # what forks share counts once
        ("more = bytearray(60 << 20); [os.fork() for _ in range(2)]; time.sleep(2)", False),
    ],
    ids=["itself", "what it has started", "forks", "shared"],
)
def test_what_takes_too_much_memory_is_ended(mark: str, code: str, too_much: bool) -> None:
    supervised = _supervised(code, max_memory_bytes=100 << 20)
    assert supervised.wait(60) == (-signal.SIGKILL if too_much else 0)
    assert supervised.exceeded_memory() is too_much
    assert _alive(mark) == []
    supervised.end()


def test_memory_without_a_limit() -> None:
    supervised = _supervised(f"{_TAKES}; time.sleep(1.5)")
    assert supervised.wait(60) == 0
    assert not supervised.exceeded_memory()
    supervised.end()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        supervised = SupervisedProcess([str(tmp_path / "nothing")], output=file)
    assert supervised.wait(60) == 127
    supervised.end()
    assert "nothing: " in log.read_text()
