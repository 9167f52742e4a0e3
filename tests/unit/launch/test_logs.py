"""Logs of ranks: what prints without end takes a bounded space, and its begin and end stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmsuite.launch import logs
from llmsuite.launch.logs import LogLimit, LogReader, log_end

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 4 * MIB)
    monkeypatch.setattr(logs, "KEPT_BYTES", MIB)
    monkeypatch.setattr(logs, "_MAX_LAG", 2 * MIB)


def test_a_log_without_end_takes_a_bounded_space(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    said: list[str] = []
    limit = LogLimit([path], said.append)
    with open(path, "wb") as rank:
        rank.write(b"first\n")
        for number in range(40):
            rank.write(b"%d " % number * (MIB // 4))
            rank.flush()
            limit.check()
            if said:
                pytest.skip(f"this file system has no holes: {said}")
            assert os.stat(path).st_blocks * 512 <= 5 * MIB
        rank.write(b"\nlast\n")
    content = path.read_bytes()
    assert content.startswith(b"first\n0 0 ")
    assert content.endswith(b"39 39 \nlast\n")
    assert b"bytes of this log are left out: it was longer than 4,194,304]" in content
    assert log_end(path).endswith("39 39 \nlast\n")
    assert len(log_end(path)) == MIB


def test_a_short_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"x" * 3 * MIB)
    LogLimit([path, tmp_path / "gone"], pytest.fail).check()
    assert path.read_bytes() == b"x" * 3 * MIB
    assert log_end(tmp_path / "gone") == ""


def test_a_file_system_without_holes_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(logs, "_punch", refuse)
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"x" * 6 * MIB)
    said: list[str] = []
    limit = LogLimit([path], said.append)
    limit.check()
    limit.check()
    assert said == [f"{path}: takes more than 4,194,304 bytes; none can be left out: not supported\n"]
    assert path.stat().st_size == 6 * MIB


def test_a_reader_that_lags_skips_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "workerlog.0"
    path.write_bytes(b"of an earlier rank\n")
    reader = LogReader(path)
    with open(path, "ab") as rank:
        rank.write(b"one\n")
        rank.flush()
        assert reader.read() == "one\n"
        assert reader.read() == ""
        rank.write(b"x" * 3 * MIB + b"\nlast\n")
        rank.flush()
        text = reader.read()
        assert text.startswith(f"\n[{2 * MIB + 6:,} bytes are left out here; see {path}]\nxxx")
        assert text.endswith("xxx\nlast\n")
        assert reader.read() == ""
    reader.close()
