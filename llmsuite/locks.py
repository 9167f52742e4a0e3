"""Locks that die with their process, and what only their holder may delete. No name here leads through a link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from llmsuite.errors import UserError

LOCK = ".lock"
"""The file of a directory that is locked."""
_LOOK_SECONDS = 0.1
"""`is_locked` takes a free lock for a moment."""
_SETTLED_SECONDS = 60
"""A temporary directory of a process may be without its lock for a moment after it is made."""


def open_lock(path: Path) -> IO[bytes]:
    """Open a file that is locked, created if needed; nothing is written to it. Raises OSError where a link or anything
    but a file has its name: it might be somebody else's, or block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no file")
    return open(descriptor, "rb+", buffering=0)


def lock_directory(directory: Path) -> IO[bytes]:
    """Make a directory and lock it for this process, as long as the returned file is open.

    Raises:
        UserError: another process has it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open_lock(directory / LOCK)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written to: {error.strerror}; choose another output_dir") from error
    if not (_taken(lock) or _taken(lock, _LOOK_SECONDS)):
        lock.close()
        raise UserError(f"{directory}: another run is writing there; stop it, or choose another output_dir")
    return lock


class OpenDirectory:
    """A directory that is written to for a long time: somebody may remove it meanwhile, or put another in its place,
    which no lock keeps anybody from. It stays open, so that no other directory can be taken for it."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def is_there(self) -> bool:
        """Whether its path still leads to it; of a closed one, to any."""
        try:
            found = os.stat(self._path)
            return self._descriptor is None or os.path.samestat(found, os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # a network that is away for a moment takes no directory away
            return True

    def check(self) -> None:
        """Raise UserError where its path no longer leads to it: what is written there would be lost, or mixed with
        what others write."""
        if not self.is_there():
            raise UserError(
                f"{self._path}: was removed or replaced while it was written to; nothing more is written. Keep what "
                "cleans up away from it, or choose another output_dir, and start again"
            )

    def close(self) -> None:
        """Close it; what is closed stays so."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _taken(lock: IO[bytes], after: float = 0.0) -> bool:
    """Whether a lock is free after so many seconds; it is taken then."""
    time.sleep(after)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def is_locked(directory: Path) -> bool | None:
    """Whether a process of this machine has locked a directory; None where that cannot be told."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)  # which gives it back
    return False


def remove_any(path: Path) -> None:
    """Delete what is at a path, if anything is: a directory with all that is in it; of a link the link only. Raises
    OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Delete those of some files that nobody has locked, and that are not so new that somebody is about to. Writers of
    such files lock them until they have their name."""
    for path in paths:
        with contextlib.suppress(OSError):  # somebody else's, in use, or gone
            if time.time() - path.lstat().st_mtime > _SETTLED_SECONDS:
                with open_lock(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def empty_directory(directory: Path) -> None:
    """Make a directory, and delete all that is in it, unless another process has locked it.

    Raises:
        UserError: as `lock_directory`.
    """
    with lock_directory(directory):
        try:
            for path in directory.iterdir():
                if path.name != LOCK:  # a new one would be another lock
                    remove_any(path)
        except OSError as error:
            raise UserError(f"{directory}: cannot be emptied: {error.strerror}; a part of it may be gone") from error


@contextlib.contextmanager
def scratch_directory(prefix: str = "llmsuite-") -> Iterator[Path]:
    """A temporary directory of this process, which is removed at the end. Those of processes that have died are
    removed too."""
    _remove_dead(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as directory, lock_directory(Path(directory)):
        yield Path(directory)


def _remove_dead(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, UserError):  # somebody else's, or in use
            found = path.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and (path / LOCK).is_file()
            if is_ours and time.time() - found.st_mtime > _SETTLED_SECONDS:
                with lock_directory(path):
                    shutil.rmtree(path)
