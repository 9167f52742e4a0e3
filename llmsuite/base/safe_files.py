"""Access to untrusted files: they are opened only when they are regular files, and copied only when they really are in
their directory.

A name in a model, a data set or an archive may be a pipe without a writer, a device without an end, or a link to a
private file. So all code that reads such files opens them by this module.

A name may also be impossible for a file: too long, or with a NUL or half of a surrogate pair in it. `Path.is_file` and
the like raise OSError for some of these, and for directories without permission. So files are also tested by
this module.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError

MAX_JSON_BYTES = 1 << 28
"""Bytes of a JSON file: the index of a model with a million tensors has less than half of it."""
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG)
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_file(path: Path | str) -> bool:
    """True for a regular file, or a link to one. Raises UserError without permission."""
    found = _stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_dir(path: Path | str) -> bool:
    """True for a directory, or a link to one. Raises UserError without permission."""
    found = _stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def exists(path: Path | str) -> bool:
    """True for a path that exists. Raises UserError without permission."""
    return _stat(path) is not None


def real_path(path: Path | str) -> Path:
    """The absolute path without links; of a loop of links, for which `Path.resolve` raises RuntimeError, a path that
    does not exist."""
    return Path(os.path.realpath(path))


def listed(directory: Path, pattern: str = "*") -> list[Path]:
    """The paths in a directory that match a pattern of `Path.glob`, sorted; empty where there is no directory. Raises
    UserError without permission."""
    if is_dir(directory):
        return sorted(directory.glob(pattern))
    return []


def path_name_error(path: Path | str) -> str | None:
    """The reason why no file can have a name; None where one can."""
    try:
        os.lstat(path)
    except ValueError as error:  # NUL, or half of a surrogate pair
        return str(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return error.strerror
        return None
    return None


def is_local_name(name: Any, below: bool = False) -> bool:
    """True where the name of a file, found in an untrusted file, is a name in the same directory, so that no file
    elsewhere is read.

    Args:
        name: the value that was found, of any type.
        below: also accept a name in a subdirectory, such as "a/b".
    """
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    parts = name.split("/")
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (below or len(parts) == 1) and not any(part in ("", ".", "..") for part in parts)


def _stat(path: Path | str) -> os.stat_result | None:
    """The status of a path; None where it does not exist, or no file can have this name."""
    try:
        return os.stat(path)
    except ValueError:  # NUL, or half of a surrogate pair
        return None
    except OSError as error:
        if error.errno in _NOTHING:
            return None
        raise UserError(f"{path}: cannot be looked at: {error.strerror}") from error


def open_regular(path: Path, buffering: int = -1) -> Any:
    """Open a regular file, or a link to one, for reading bytes, as `open` does.

    Raises:
        OSError: it cannot be opened, or is no regular file: `strerror` says what it is.
    """
    try:
        _check(path, os.stat(path))  # checked before it is opened: opening a device may have effects
    except ValueError as error:
        raise OSError(errno.EINVAL, f"is no name of a file: {error}", str(path)) from error
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    )  # not blocking: it may have become a pipe since
    try:
        _check(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb", buffering)


def open_at_once(path: Path | str) -> Any:
    """Open a file or a pipe for reading bytes, as `open` does, without waiting for a writer: a pipe that nobody writes
    to is empty. This is for files that the user names, such as `<(command)` of a shell. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    try:
        return open(descriptor, "rb")
    except OSError:  # a directory
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """The content of a regular file. Raises OSError where it is none, cannot be read, or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size:,} bytes; at most {most:,} are read", str(path))
        found: bytes = file.read(size)  # allocates this size, which was checked
    return found


def check_local(path: Path) -> None:
    """Check that a file is a regular file of its directory, and no link to a file elsewhere.

    A hub's cache keeps the files of a model in `blobs`, and links to them in `snapshots/COMMIT`: such links are
    accepted.

    Raises:
        OSError: it is no such file.
    """
    here = real_path(path.parent)
    real = real_path(path)
    inside = here
    if here.parent.name == "snapshots":
        inside = here.parent.parent / "blobs"
    if here not in real.parents and inside not in real.parents:
        raise OSError(errno.ELOOP, f"is a link to {real}; put a copy of that file in its place", str(path))
    open_regular(path).close()


def copy_regular(source: Path, target: Path) -> None:
    """Copy a file of a directory. Raises OSError where `check_local` does, or when the copy cannot be written."""
    check_local(source)
    with open_regular(source) as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 20)


def _check(path: Path, found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = next((what for is_kind, what in _KINDS if is_kind(found.st_mode)), "something else")
    raise OSError(errno.EINVAL, f"is {what}, not a regular file", str(path))
