"""One run a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base import locks
from llmsuite.base.cache import locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    REPLACED,
    broken_file,
    check_intact,
    committed_checkpoint,
    committed_directory,
    write_text_atomic,
)
from llmsuite.base.locks import OpenDirectory, empty_directory, is_locked, lock_directory, scratch_directory
from llmsuite.checkpoint.directory import name_latest, remove_unfinished


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"
    first = lock_directory(directory)
    with pytest.raises(UserError, match="another run is writing there"):
        lock_directory(directory)
    first.close()
    lock_directory(directory).close()


def test_is_locked_does_not_change_the_lock(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is None, "it has never been"
    with lock_directory(tmp_path):
        assert is_locked(tmp_path) is True
        with pytest.raises(UserError):
            lock_directory(tmp_path)
    assert is_locked(tmp_path) is False
    lock_directory(tmp_path).close()


def test_a_run_starts_while_another_process_checks_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_directory(tmp_path).close()
    with open(tmp_path / ".lock", "rb") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        with pytest.raises(UserError):
            lock_directory(tmp_path)
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: fcntl.flock(look, fcntl.LOCK_UN) if seconds else None)
        lock_directory(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run: cannot be written to: Not a directory; choose another output_dir"):
        lock_directory(tmp_path / "file" / "run")


def test_a_directory_is_emptied_by_the_holder_of_its_lock_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "link").symlink_to(precious)
    with lock_directory(run):
        with pytest.raises(UserError, match="another run is writing there"):
            empty_directory(run)
        assert (run / "checkpoints" / "step-1").is_dir()
    empty_directory(run)
    assert [path.name for path in run.iterdir()] == [".lock"]
    assert (precious / "file").read_text() == "kept"


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory"])
def test_a_lock_is_a_file_and_nothing_else(tmp_path: Path, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    for name, lock in ((".lock", lock_directory), ("lock", lambda path: locked(path / "lock").__enter__())):
        place = tmp_path / f"of {name}"
        place.mkdir()
        put: dict[str, Callable[[Path], object]] = {
            "link": lambda path: path.symlink_to(precious),
            "dangling": lambda path: path.symlink_to(tmp_path / "nowhere"),
            "fifo": os.mkfifo,
            "directory": Path.mkdir,
        }
        put[kind](place / name)
        with pytest.raises(UserError):
            lock(place)
    assert precious.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_keeps_what_is_in_its_file(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("kept")
    lock_directory(tmp_path).close()
    assert (tmp_path / ".lock").read_text() == "kept"


def put_link(place: Path, target: Path) -> None:
    place.symlink_to(target)


def put_file(place: Path, target: Path) -> None:
    place.write_text("in the way")


def put_fifo(place: Path, target: Path) -> None:
    os.mkfifo(place)


def put_directory(place: Path, target: Path) -> None:
    (place / "deep").mkdir(parents=True)


@pytest.mark.parametrize("put", [put_link, put_file, put_fifo, put_directory])
def test_what_is_in_the_way_is_removed_and_not_followed(tmp_path: Path, put: Callable[[Path, Path], None]) -> None:
    root = tmp_path / "checkpoints"
    precious = tmp_path / "precious"
    root.mkdir()
    precious.mkdir()
    (precious / "file").write_text("kept")
    names = ("latest.tmp", "step-7.tmp", "step-8.tmp", f"step-8{REPLACED}")

    def obstruct() -> None:
        for name in names:
            put(root / name, precious)

    obstruct()
    write_text_atomic(root / "latest", "step-7")
    assert (root / "latest").read_text() == "step-7"
    for _ in range(2):  # new, and in place of one that is there
        with committed_checkpoint(root / "step-8", {}, is_created=False) as directory:
            (directory / "file").write_text("new")
    assert broken_file(root / "step-8") is None
    for name in names:
        if not (root / name).is_symlink() and not (root / name).exists():
            put(root / name, precious)
    remove_unfinished(root)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-8"]
    assert (precious / "file").read_text() == "kept"


def test_latest_names_the_newest_again(tmp_path: Path) -> None:
    for text in (None, b"step-3", b"\xff"):
        if text is not None:
            (tmp_path / "latest").write_bytes(text)
        name_latest(tmp_path, tmp_path / "step-7")
        assert (tmp_path / "latest").read_text() == "step-7\n"


def test_a_flipped_bit_is_found_where_there_is_a_manifest(tmp_path: Path) -> None:
    with committed_directory(tmp_path / "one") as directory:
        (directory / "model.safetensors").write_bytes(bytes(100))
    check_intact(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").write_bytes(bytes(99) + b"\1")
    with pytest.raises(UserError, match="does not have the sha256 it was written with"):
        check_intact(tmp_path / "one")
    (tmp_path / "one" / "manifest.json").unlink()
    check_intact(tmp_path / "one")


def test_scratch_of_the_dead_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = 1_000_000_000
    for name in ("llmsuite-dead", "llmsuite-young", "llmsuite-none", "other-dead"):
        (tmp_path / name).mkdir()
        if name != "llmsuite-none":
            (tmp_path / name / ".lock").touch()
        if name != "llmsuite-young":
            os.utime(tmp_path / name, (old, old))
    with scratch_directory() as first:
        (first / "file").touch()
        os.utime(first, (old, old))
        with scratch_directory() as second:
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {"llmsuite-young", "llmsuite-none", "other-dead", first.name, second.name}
    assert not first.exists()
    assert locks._SETTLED_SECONDS > 0


def _moved_back(directory: Path) -> None:
    directory.rename(directory.with_name("away"))
    directory.with_name("away").rename(directory)


def _replaced(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _linked_elsewhere(directory: Path) -> None:
    directory.rename(directory.with_name("away"))
    directory.with_name("other").mkdir()
    directory.symlink_to(directory.with_name("other"))


def test_a_second_interrupt_leaves_no_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def interrupted(*arguments: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(*arguments, **options)

    used: list[Path] = []

    def work() -> None:
        with scratch_directory() as directory:
            used.append(directory)
            (directory / "part").write_text("x")
            monkeypatch.setattr(shutil, "rmtree", interrupted)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not used[0].exists()


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        (shutil.rmtree, False),
        (_replaced, False),
        (lambda directory: directory.rename(directory.with_name("away")), False),
        (_linked_elsewhere, False),
        (_moved_back, True),
        (lambda directory: (directory / "file").touch(), True),
    ],
)
def test_a_directory_that_is_no_longer_at_its_place_is_noticed(
    change: Callable[[Path], object], stays: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    with contextlib.closing(OpenDirectory(directory)) as opened:
        opened.check()
        change(directory)
        assert opened.is_there() == stays
        if not stays:
            with pytest.raises(UserError, match=f"{directory}: was removed or replaced while it was written to"):
                opened.check()
        opened.close()
        assert opened.is_there() == directory.exists()
