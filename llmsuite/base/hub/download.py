"""Downloads files of a hub: in parallel, resumed after interruptions, and compared with the digests of the hub."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.hub.listing import Hub, Interrupted, Kind, RemoteFile, Report, Unreachable, matches_digest
from llmsuite.base.hub.names import HUBS, HubName
from llmsuite.base.progress import track_bytes
from llmsuite.base.safe_files import is_file
from llmsuite.base.threads import run_all

_CONNECTIONS = 8
_ATTEMPTS = 5
_WAIT_SECONDS = 1.0
_MIN_PROGRESS = 1024
"""Bytes that an attempt has to bring: a server that sends single bytes is given up."""
_POLL_SECONDS = 0.2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fetch_files(
    hub: Hub, name: HubName, kind: Kind, files: Mapping[str, RemoteFile], directory: Path, report: Report
) -> None:
    """Fetch files that are missing here, and compare all files with the digests of the hub."""
    absent = {path: file for path, file in files.items() if not is_file(directory / path)}
    if absent:
        left = sum((file.size or 0) - hub.received(name, kind, path, file) for path, file in absent.items())
        _check_space(name, directory, left)
        report(f"fetching {name}: {len(absent)} files, {left / 1e6:,.1f} MB, into {directory}")
        _download_all(hub, name, kind, absent)
    damaged = _damaged(files, directory)
    if not damaged:
        return
    report(f"{name}: {', '.join(damaged)} arrived damaged; fetching again")
    again = {path: files[path] for path in damaged}
    for path, file in again.items():
        hub.discard(name, kind, path, file)
    _download_all(hub, name, kind, again)
    if damaged := _damaged(again, directory):
        for path in damaged:
            hub.discard(name, kind, path, files[path])
        raise UserError(
            f"{name}: {', '.join(damaged)} has another size or digest than on {HUBS[name.hub]}, twice; a proxy or a "
            "mirror changes it, or the upload is broken. Nothing of it was kept"
        )


def _download_all(hub: Hub, name: HubName, kind: Kind, files: Mapping[str, RemoteFile]) -> None:
    def task(path: str, file: RemoteFile) -> Callable[[], None]:
        return lambda: _download(hub, name, kind, path, file)

    # the largest last: so errors in small files are found early
    ordered = sorted(files.items(), key=lambda item: item[1].size or 0)
    total = sum(file.size or 0 for file in files.values())
    with _progress(hub, name, kind, files, total):
        run_all([task(path, file) for path, file in ordered], min(_CONNECTIONS, len(files)))


def _download(hub: Hub, name: HubName, kind: Kind, path: str, file: RemoteFile) -> None:
    """Fetch a file, resuming after interruptions without a limit as long as each attempt makes progress."""
    failures = 0
    before = hub.received(name, kind, path, file)
    while True:
        try:
            return hub.download(name, kind, path, file)
        except Interrupted as error:
            now = hub.received(name, kind, path, file)
            if file.size is not None and now > file.size:
                hub.discard(name, kind, path, file)
                now = 0
            failures = 0 if now - before >= _MIN_PROGRESS else failures + 1
            before = now
            if failures == _ATTEMPTS:
                raise Unreachable(
                    f"{name}: the connection breaks off at byte {now:,} of {path}: {error}; the part that has arrived "
                    "is kept: start again"
                ) from error
            if failures:
                time.sleep(_WAIT_SECONDS * 2 ** (failures - 1))


@contextmanager
def _progress(hub: Hub, name: HubName, kind: Kind, files: Mapping[str, RemoteFile], total: int) -> Iterator[None]:
    """Show the number of bytes received, from the sizes of the files, as libraries report progress differently."""

    def received() -> int:
        return sum(hub.received(name, kind, path, file) for path, file in files.items())

    ended = threading.Event()
    with track_bytes(total, f"fetching {name.repo}") as progress:

        def watch() -> None:
            shown = 0
            while True:
                is_last = ended.wait(_POLL_SECONDS)
                now = received()
                progress(max(0, now - shown))
                shown = max(now, shown)
                if is_last:
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _damaged(files: Mapping[str, RemoteFile], directory: Path) -> list[str]:
    found: list[str] = []

    def task(path: str) -> Callable[[], None]:
        def check() -> None:
            if not is_file(directory / path) or not matches_digest(directory / path, files[path]):
                found.append(path)

        return check

    run_all([task(path) for path in files], min(_CONNECTIONS, len(files)))
    return sorted(found)


def _check_space(name: HubName, directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"{name}: needs {needed / 1e9:,.1f} GB, and {directory} has {free / 1e9:,.1f} GB left; {_elsewhere(name)}"
        )


@contextmanager
def disk_errors(name: HubName) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        hint = ""
        if error.errno in _FULL:
            hint = f"; {_elsewhere(name)}"
        where = "the cache "
        if error.filename:
            where = f"{error.filename} "
        raise UserError(
            f"{name}: {where}cannot be written: {error.strerror}; the part that has arrived is kept{hint}"
        ) from error


def _elsewhere(name: HubName) -> str:
    variable = {"hf": "HF_HOME", "ms": "MODELSCOPE_CACHE"}.get(name.hub, "LLMSUITE_CACHE")
    return f"make room, or set {variable} to a directory with more"
