"""Locks that end with their process, and deletion of files that only the holder of a lock may delete. Symbolic links
are never followed."""

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

from llmsuite.base.errors import UserError
from llmsuite.base.interrupts import held_interrupts

LOCK = ".lock"
"""Name of the file that is locked for a directory."""
_RETRY_SECONDS = 0.1
"""`is_locked` takes a free lock for a moment."""
_SETTLED_SECONDS = 60
"""A temporary directory of a process may be without its lock for a moment after it is made."""


def open_lock(path: Path) -> IO[bytes]:
    """Open a file for locking, created if needed; nothing is written to it. Raises OSError where it is a link or no
    regular file: a link may lead to a file of another user, and a pipe would block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no file")
    return open(descriptor, "rb+", buffering=0)


def lock_directory(directory: Path) -> IO[bytes]:
    """Make a directory and lock it for this process, as long as the returned file is open.

    Raises:
        UserError: another process has locked it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open_lock(directory / LOCK)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written to: {error.strerror}; choose another output_dir") from error
    if not (_try_lock(lock) or _try_lock(lock, _RETRY_SECONDS)):
        lock.close()
        raise UserError(f"{directory}: another run is writing there; stop it, or choose another output_dir")
    return lock


class OpenDirectory:
    """A directory that is written to for a long time. No lock prevents that it is removed or replaced meanwhile. It
    stays open, so that its inode number is not reused by another directory."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def is_there(self) -> bool:
        """True where its path still leads to it (after `close`: to any directory)."""
        try:
            found = os.stat(self._path)
            return self._descriptor is None or os.path.samestat(found, os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:  # a network error that may be temporary does not mean that the directory is removed
            return True

    def check(self) -> None:
        """Raise UserError where its path no longer leads to it: files written there would be lost, or mixed with those
        of other processes."""
        if not self.is_there():
            raise UserError(
                f"{self._path}: was removed or replaced while it was written to; nothing more is written. Exclude it "
                "from automatic cleaning, or choose another output_dir, and start again"
            )

    def close(self) -> None:
        """Close it; may be called several times."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _try_lock(lock: IO[bytes], after: float = 0.0) -> bool:
    """Try to take a lock after `after` seconds. Returns True on success."""
    time.sleep(after)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def is_locked(directory: Path) -> bool | None:
    """True where a process of this machine has locked a directory; None where that is unknown."""
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
        os.close(descriptor)  # releases the lock
    return False


def remove_path(path: Path) -> None:
    """Delete a file, a directory with its content, or a link (not its target); nothing where the path does not exist.
    Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Delete those of some files that no process has locked, unless they are so new that a process may be about to lock
    them. Writers of such files lock them until they are renamed."""
    for path in paths:
        with contextlib.suppress(OSError):  # of another user, in use, or deleted already
            if time.time() - path.lstat().st_mtime > _SETTLED_SECONDS:
                with open_lock(path) as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def empty_directory(directory: Path) -> None:
    """Make a directory, and delete its content, unless another process has locked it.

    Raises:
        UserError: another process has locked it, or it cannot be made or emptied.
    """
    with lock_directory(directory):
        try:
            for path in directory.iterdir():
                if path.name != LOCK:  # a new file would be another lock
                    remove_path(path)
        except OSError as error:
            raise UserError(f"{directory}: cannot be emptied: {error.strerror}; a part may be deleted") from error


@contextlib.contextmanager
def scratch_directory(prefix: str = "llmsuite-") -> Iterator[Path]:
    """A temporary directory of this process, which is removed at the end. Those of processes that have died are
    removed too."""
    _remove_dead(prefix)
    # a second Ctrl-C while the first one is dealt with would leave a part of the directory
    with held_interrupts():
        scratch = tempfile.TemporaryDirectory(prefix=prefix)
    try:
        with lock_directory(Path(scratch.name)):
            yield Path(scratch.name)
    finally:
        with held_interrupts():
            scratch.cleanup()


def _remove_dead(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError, UserError):  # of another user, or in use
            found = path.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and (path / LOCK).is_file()
            if is_ours and time.time() - found.st_mtime > _SETTLED_SECONDS:
                with lock_directory(path):
                    shutil.rmtree(path)
