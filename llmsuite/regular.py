"""Files that strangers made: opened only when they are regular files, and copied only when they lie where they seem to.

A name in a model, a data set or an archive may be a pipe that nobody writes to, a device without an end, or a link to
what is none of a model's business. Whatever reads such a file opens it here.

A name may also be none that a file can have: too long, or with a NUL or half of a surrogate pair in it. `Path.is_file`
and its like raise OSError for some of these, and for what may not be looked at. Whoever asks what is there asks here.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError

MOST_JSON = 1 << 28
"""Bytes of a JSON file: the index of a model with a million tensors has less than half of it."""
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG)
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_file(path: Path | str) -> bool:
    """Whether there is a regular file, or a link to one. Raises UserError: nobody may look there."""
    found = _looked_up(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: Path | str) -> bool:
    """Whether there is a directory, or a link to one. Raises UserError: nobody may look there."""
    found = _looked_up(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def exists(path: Path | str) -> bool:
    """Whether there is anything. Raises UserError: nobody may look there."""
    return _looked_up(path) is not None


def listed(directory: Path, pattern: str = "*") -> list[Path]:
    """What is in a directory by a pattern of `Path.glob`, sorted; nothing where there is none. Raises UserError: nobody
    may look there."""
    return sorted(directory.glob(pattern)) if is_dir(directory) else []


def name_fault(path: Path | str) -> str | None:
    """Why no file can have a name; None where one can."""
    try:
        os.lstat(path)
    except ValueError as error:  # NUL, or half of a surrogate pair
        return str(error)
    except OSError as error:
        return error.strerror if error.errno == errno.ENAMETOOLONG else None
    return None


def is_own_name(name: Any, below: bool = False) -> bool:
    """Whether what a stranger's file gives for the name of another file is that of one in the same directory, so that
    nothing is looked for elsewhere.

    Args:
        name: what is given, of any type.
        below: whether the file may lie in a directory of that directory, as in "a/b".
    """
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    parts = name.split("/")
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (below or len(parts) == 1) and not any(part in ("", ".", "..") for part in parts)


def _looked_up(path: Path | str) -> os.stat_result | None:
    """What the file system says of a path; None where there is nothing, or can be nothing."""
    try:
        return os.stat(path)
    except ValueError:  # NUL, or half of a surrogate pair
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise UserError(f"{path}: cannot be looked at: {error.strerror}") from error


def open_regular(path: Path, buffering: int = -1) -> Any:
    """A regular file, or a link to one, opened to be read; `buffering` as of `open`, whose result it is.

    Raises:
        OSError: it cannot be opened, or is none: `strerror` says what it is.
    """
    try:
        _check(path, os.stat(path))  # a device may act on being opened
    except ValueError as error:
        raise OSError(errno.EINVAL, f"is no name of a file: {error}", str(path)) from error
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe since
    try:
        _check(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering)


def read_regular(path: Path, most: int = MOST_JSON) -> bytes:
    """All of a regular file. Raises OSError: it is none, cannot be read, or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes; at most {most:,} are read", str(path))
        found: bytes = file.read(size)  # as much memory is taken at once
    return found


def check_own(path: Path) -> None:
    """Check that a file of a directory is a regular file of it, and not what lies elsewhere under the name of a link.

    A hub's cache keeps the files of a model in `blobs`, and links to them in `snapshots/COMMIT`: such links are fine.

    Raises:
        OSError: it is none.
    """
    here, real = path.parent.resolve(), path.resolve()
    inside = here.parent.parent / "blobs" if here.parent.name == "snapshots" else here
    if here not in real.parents and inside not in real.parents:
        raise OSError(errno.ELOOP, f"is a link to {real}; put a copy of that file in its place", str(path))
    open_regular(path).close()


def copy_regular(source: Path, target: Path) -> None:
    """Copy a file of a directory. Raises OSError as `check_own`, or when the copy cannot be written."""
    check_own(source)
    with open_regular(source) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def _check(path: Path, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = next((what for is_kind, what in _KINDS if is_kind(found.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"is {what}, not a regular file", str(path))
