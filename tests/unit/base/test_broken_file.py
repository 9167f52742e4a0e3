"""Faults of a committed directory, and small files replaced atomically."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import broken_file, write_text_atomic
from tests.support.os_steps import write


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path, "text")
    return tmp_path / "step-1"


def test_an_intact_directory_has_no_fault(whole: Path) -> None:
    assert broken_file(whole) is None
    assert broken_file(whole, check_hashes=False) is None


@pytest.mark.parametrize("name", ["first", "second", "manifest.json"])
def test_a_missing_file_is_found(whole: Path, name: str) -> None:
    (whole / name).unlink()
    assert name in (broken_file(whole, check_hashes=False) or "")


def test_a_truncated_file_is_found(whole: Path) -> None:
    os.truncate(whole / "second", 7)
    assert broken_file(whole, check_hashes=False) == f"{whole / 'second'} has 7 bytes instead of 8"


def test_any_flipped_bit_is_found_by_its_hash(whole: Path) -> None:
    content = (whole / "first").read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (whole / "first").write_bytes(flipped)
        assert "sha256" in (broken_file(whole) or "")
        assert broken_file(whole, check_hashes=False) is None


GARBLED = [
    "",
    "{",
    "\0\0\0",
    "[" * 100_000,
    "[]",
    "7",
    "null",
    "{}",
    '{"file": {}}',
    '{"files": []}',
    '{"files": null}',
]
GARBLED += ['{"files": {"first": 1}}', '{"files": {"first": {"size": 4}}}']


@pytest.mark.parametrize("text", GARBLED, ids=range(len(GARBLED)))
def test_a_garbled_manifest_is_a_fault(whole: Path, text: str) -> None:
    (whole / "manifest.json").write_text(text)
    assert "manifest.json" in (broken_file(whole) or "")


def test_a_file_that_cannot_be_read_is_a_fault(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, start: int, end: int) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("llmsuite.base.files.sha256_of", fail)
    assert broken_file(whole) == f"{whole / 'first'} cannot be read: Input/output error"


def test_write_text_atomic_replaces_and_keeps_what_it_is_given(tmp_path: Path) -> None:
    for text in ("one\n", "\u4e16\u754c", ""):
        write_text_atomic(tmp_path / "file", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(UserError, match="absent"):
        write_text_atomic(tmp_path / "absent" / "file", "text")
