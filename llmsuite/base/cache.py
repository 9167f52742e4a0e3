"""The cache: files that are kept from run to run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.locks import open_lock
from llmsuite.base.safe_files import is_file

BUILT = "built"
"""Directory of the cache with what was compiled for this machine."""


def cache_root() -> Path:
    """`$LLMSUITE_CACHE`, else llmsuite's directory below `$XDG_CACHE_HOME` or `~/.cache`; an empty variable counts as
    unset."""
    if given := os.environ.get("LLMSUITE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "llmsuite"


def private_directory(directory: Path) -> Path:
    """Make a directory of the cache for files that are executed: no other user may write there, nor in its parent.

    Raises:
        UserError: another user owns one of them, or it cannot be made.
    """
    try:
        for place in (directory.parent, directory):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.stat()
            if found.st_uid != os.getuid():
                raise UserError(
                    f"{place}: belongs to another user, who could put code there; set LLMSUITE_CACHE to a directory of "
                    "your own"
                )
            if found.st_mode & 0o022:
                place.chmod(found.st_mode & 0o755)
    except OSError as error:
        raise UserError(f"{directory}: {error.strerror}; set LLMSUITE_CACHE to a directory to write in") from error
    return directory


def is_private_file(path: Path) -> bool:
    """True where a file exists that no other user can have written."""
    if path.is_symlink() or not is_file(path):
        return False
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def isolated_cache(directory: Path) -> Path:
    """Make a directory an empty cache that shares only the code compiled for this machine.

    Returns:
        The directory, for `$LLMSUITE_CACHE`.
    """
    built = cache_root() / BUILT
    built.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # several ranks may make the same one
        (directory / BUILT).symlink_to(built.resolve())
    return directory


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file of the cache, created if needed, against other processes, which wait; the lock dies with the process.

    Raises:
        UserError: the cache cannot be written to.
    """
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path)
    except OSError as error:
        raise UserError(f"{path.parent}: {error.strerror}; set LLMSUITE_CACHE to a directory to write in") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
