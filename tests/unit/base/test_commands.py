"""Commands whose output is taken with a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base import commands
from llmsuite.base.commands import CommandTimeout, run_command
from tests.support.paths import ROOT


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_streams_and_exit_code_are_those_of_the_command() -> None:
    done = run_command(python("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"))
    assert (done.code, done.output, done.errors) == (3, "a\n", "b\n")
    assert run_command(python("import os; os.kill(os.getpid(), 9)")).code == -signal.SIGKILL
    assert run_command(python("import os; print(os.environ['WORD'])"), {"WORD": "x"}).output == "x\n"
    with pytest.raises(FileNotFoundError):
        run_command(["/no/such/program"])


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_the_begin_and_the_end_are_kept(parts: list[bytes]) -> None:
    most = 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "MAX_BYTES", most)
        kept = commands.Kept()
        for part in parts:
            kept.add(part)
        data = b"".join(parts)
        if len(data) <= most:
            assert kept.text() == data.decode("utf-8", "replace")
        else:
            assert kept.text() == (
                data[: most // 2] + f"\n[{len(data) - most:,} bytes are left out]\n".encode() + data[-most // 2 :]
            ).decode("utf-8", "replace")


def test_output_without_end_is_cut_and_the_command_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_BYTES", 1000)
    done = run_command(python("import sys\nfor i in range(100_000): print(i)\nprint('end', file=sys.stderr)"))
    assert done.code == 0
    assert done.output.startswith("0\n1\n2\n")
    assert done.output.endswith("99998\n99999\n")
    assert "bytes are left out" in done.output
    assert len(done.output) < 1100
    assert done.errors == "end\n"
    monkeypatch.setattr(commands, "MAX_PRINTED_BYTES", 1 << 20)
    with pytest.raises(CommandTimeout, match="prints more than 1,048,576 bytes"):
        run_command(python("while True: print('x' * 1000)"))


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_what_a_command_has_started_ends_with_it(tmp_path: Path, closes: bool) -> None:
    child = "import time; time.sleep(600)"
    close = "os.close(1); os.close(2)" if closes else ""
    program = (
        "import os, subprocess, sys; print('a', flush=True);"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); {close}"
    )
    done = run_command(python(program))
    assert (done.code, done.output) == (0, "a\n")
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_nothing_is_left_when_who_has_started_it_is_killed(tmp_path: Path) -> None:
    """As of a compiler: it starts others, which SIGKILL of the first does not reach."""
    deeper = f"import os, time; open({str(tmp_path / 'deeper')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    program = (
        "import os, subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {deeper!r}], start_new_session=True);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    starts = f"from llmsuite.base.commands import run_command; run_command({python(program)!r})"
    process = subprocess.Popen(python(starts))
    pids = []
    for name in ("pid", "deeper"):
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
            assert process.poll() is None
            time.sleep(0.05)
        pids.append(int((tmp_path / name).read_text()))
    process.kill()
    process.wait()
    assert [is_gone(pid) for pid in pids] == [True, True]


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(CommandTimeout, match="takes too long"):
        run_command(python("import os, time; os.close(1); os.close(2); time.sleep(600)"), seconds=0.5)


def is_gone(pid: int) -> bool:
    """Return True when a process has ended; its new parent may not have waited for it."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def test_no_other_module_takes_all_output_of_a_command() -> None:
    for path in (ROOT / "llmsuite").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for form in ("capture_output=", "subprocess.check_output", "communicate(", "getoutput("):
            assert form not in text, f"{path}: run_command keeps a part of the output"
