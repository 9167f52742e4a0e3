"""A directory exists whole or not at all, wherever the process that writes it fails or dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.base.files import REPLACED, backup_path, broken_file, committed_directory, resumable_directory
from llmsuite.base.locks import LOCK
from llmsuite.checkpoint.directory import remove_unfinished
from tests.support.os_steps import OsSteps, write
from tests.support.paths import ROOT


class Killed(BaseException):
    """Like KeyboardInterrupt: no handler of OSError or Exception stops it."""


@pytest.fixture(scope="module")
def steps() -> OsSteps:
    return OsSteps()


def nothing_there(root: Path) -> None:
    root.mkdir()


def one_there(root: Path) -> None:
    write(root, "old")


def leftovers_of_a_kill(root: Path) -> None:
    write(root, "old")
    for name in ("step-1.tmp", f"step-1{REPLACED}"):
        (root / name).mkdir()
        (root / name / "half").write_text("written")


STARTS = [nothing_there, one_there, leftovers_of_a_kill]


def state(root: Path) -> tuple[str, str]:
    """Text in the directory and in `latest`, "" for what is not there; fails when the directory is not whole."""
    found = ""
    if (root / "step-1").exists():
        assert broken_file(root / "step-1") is None
        found = (root / "step-1" / "first").read_text()
        assert (root / "step-1" / "second").read_text() == 2 * found
    return found, (root / "latest").read_text() if (root / "latest").exists() else ""


def count_steps(steps: OsSteps, start: Callable[[Path], None], root: Path) -> int:
    start(root)
    with steps.below(root):
        write(root, "new")
    assert state(root) == ("new", "new")
    assert {path.name for path in root.iterdir()} == {"step-1", "latest"}
    assert len(steps.seen) > 20
    return len(steps.seen)


def allowed(start: Callable[[Path], None]) -> set[tuple[str, str]]:
    old = "" if start is nothing_there else "old"
    return {(old, old), ("new", old), ("new", "new")}


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_at_any_step_leaves_the_old_or_the_new_one(
    steps: OsSteps, start: Callable[[Path], None], tmp_path: Path
) -> None:
    def kill() -> None:
        raise Killed

    seen = set()
    for at in range(1, count_steps(steps, start, tmp_path / "all") + 1):
        root = tmp_path / str(at)
        start(root)
        with steps.below(root, at, kill), pytest.raises(Killed):
            write(root, "new")
        assert not (root / "step-1.tmp").exists()
        seen.add(state(root))
        write(root, "new")  # and nothing stands in the way of the next attempt
        assert state(root) == ("new", "new")
    assert seen == allowed(start)


def error_of(root: Path) -> str:
    try:
        write(root, "new")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_system_call_is_a_user_error_with_the_state_of_the_files(
    steps: OsSteps, start: Callable[[Path], None], code: int, tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    messages = []
    for at in range(1, count_steps(steps, start, tmp_path / "all") + 1):
        root = tmp_path / str(at)
        start(root)
        before = state(root)
        with steps.below(root, at, fail):
            message = error_of(root)
        assert state(root) in allowed(start)
        if not message:  # what is deleted last is a leftover, and no failure when it stays
            assert state(root) == ("new", "new")
            continue
        messages.append(message)
        assert os.strerror(code) in message
        assert not (root / "step-1.tmp").exists()
        if "nothing was changed" in message:
            assert state(root) == before
        elif "it is complete" in message:
            assert state(root)[0] == "new"
        else:  # the directory is committed, and `latest` could not follow
            assert str(root / "latest") in message
    assert sum("nothing was changed" in message for message in messages) > 10


@pytest.mark.parametrize("start", [nothing_there, one_there])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one(
    steps: OsSteps, start: Callable[[Path], None], tmp_path: Path
) -> None:
    seen = set()
    for at in range(1, count_steps(steps, start, tmp_path / "all") + 1):
        root = tmp_path / str(at)
        start(root)
        command = [sys.executable, "-m", "tests.support.os_steps", str(root), str(at)]
        assert subprocess.run(command, cwd=ROOT, check=False).returncode == 9
        remove_unfinished(root)
        assert not list(root.glob("step-1.*"))
        seen.add(state(root))
    assert seen == allowed(start)


@pytest.mark.parametrize("renames_before", [0, 1])
def test_an_interrupt_right_after_a_rename_leaves_a_complete_directory(
    renames_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_there(tmp_path)
    rename = Path.rename
    done = []

    def rename_and_stop(self: Path, target: Path) -> Path:
        done.append(target)
        result = rename(self, target)
        if len(done) == renames_before + 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Path, "rename", rename_and_stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "new")
    assert state(tmp_path) == ("new" if renames_before else "old", "old")


def test_everything_is_on_disk_before_it_becomes_visible(steps: OsSteps, tmp_path: Path) -> None:
    root = tmp_path / "root"
    one_there(root)
    with steps.below(root):
        write(root, "new")
    seen = steps.seen
    visible = seen.index(f"os.rename {root / 'step-1.tmp'}")
    for name in ("first", "second", "manifest.json"):
        assert f"os.fsync {root / 'step-1.tmp' / name}" in seen[:visible]
    assert max(i for i, step in enumerate(seen[:visible]) if "manifest.json" in step) > max(
        i for i, step in enumerate(seen[:visible]) if step.endswith(("first", "second"))
    )
    assert f"os.fsync {root / 'step-1.tmp'}" in seen[:visible]
    # the old one is deleted only once the new name is on disk too
    assert seen.index(f"os.fsync {root}") < seen.index(f"open {backup_path(root / 'step-1')}")
    assert seen.index(f"os.fsync {root / 'latest.tmp'}") < seen.index(f"os.rename {root / 'latest.tmp'}")
    assert seen[-1] == f"os.fsync {root}"


def test_an_error_in_the_block_leaves_nothing_and_passes(tmp_path: Path) -> None:
    def fail() -> None:
        with committed_directory(tmp_path / "model") as directory:
            (directory / "file").write_text("half")
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_what_was_given_and_every_file(tmp_path: Path) -> None:
    with committed_directory(tmp_path / "a" / "b", {"format": 7}) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_bytes(b"abc")
    manifest = json.loads((tmp_path / "a" / "b" / "manifest.json").read_text())
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest == {"format": 7, "files": {"sub/file": {"size": 3, "sha256": digest}}}


USERS = ["model.tmp", "model.old", "model.part"]
"""Names that directories of users may have, next to an output `model`."""


@contextlib.contextmanager
def resumable(final: Path) -> Iterator[Path]:
    with resumable_directory(final, "content", {}) as directory:
        yield directory


@pytest.mark.parametrize("writes", [committed_directory, resumable])
@pytest.mark.parametrize("name", USERS)
def test_a_directory_of_the_user_next_to_an_output_is_kept(writes: Any, name: str, tmp_path: Path) -> None:
    mine = tmp_path / name
    mine.mkdir()
    (mine / "weights").write_text("of last week")
    is_in_the_way = name == {committed_directory: "model.tmp"}.get(writes, "model.part")
    refused: Any = pytest.raises(UserError, match="in the way") if is_in_the_way else contextlib.nullcontext()
    with refused, writes(tmp_path / "model") as directory:
        (directory / "weights").write_text("new")
    assert (mine / "weights").read_text() == "of last week"
    assert (tmp_path / "model").exists() is not is_in_the_way
    assert is_in_the_way or sorted(p.name for p in (tmp_path / "model").iterdir()) == ["manifest.json", "weights"]


@pytest.mark.parametrize("writes", [committed_directory, resumable])
def test_links_and_files_in_the_way_are_kept(writes: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights").write_text("of last week")
    for name in ("model.tmp", "model.part"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
        (tmp_path / f"other{name[5:]}").write_text("notes")
    for output in ("model", "other"):
        with pytest.raises(UserError, match="in the way"), writes(tmp_path / output):
            pass
    assert (tmp_path / "mine" / "weights").read_text() == "of last week"
    assert (tmp_path / "other.tmp").read_text() == (tmp_path / "other.part").read_text() == "notes"


def test_a_directory_of_the_user_is_kept_where_an_output_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-1.old").mkdir()
    (tmp_path / "step-1.old" / "weights").write_text("of last week")
    for text in ("first", "second"):
        write(tmp_path, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-1.old"]
    assert (tmp_path / "step-1.old" / "weights").read_text() == "of last week"


def test_what_a_killed_process_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / LOCK).touch()
    (tmp_path / "model.tmp" / "half").write_text("written")
    with committed_directory(tmp_path / "model") as directory:
        (directory / "weights").write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["manifest.json", "weights"]


def test_two_processes_do_not_write_the_same_output(tmp_path: Path) -> None:
    with committed_directory(tmp_path / "model") as directory:
        (directory / "weights").write_text("new")
        with pytest.raises(UserError, match="another run is writing there"), committed_directory(tmp_path / "model"):
            pass
    assert (tmp_path / "model" / "weights").read_text() == "new"
