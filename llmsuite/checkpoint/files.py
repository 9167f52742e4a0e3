"""Directories that exist whole or not at all.

A directory is filled under a temporary name, every file is flushed to disk, the manifest is written last, and a
rename makes it visible. A process that dies at any point leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from llmsuite.errors import UserError

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@contextlib.contextmanager
def committed_directory(final: Path, manifest: dict[str, Any] | None = None) -> Iterator[Path]:
    """A temporary directory that becomes `final` when the block ends well, and is removed when it does not.

    A directory already at `final` is replaced. `manifest` is written into it last, with the size and sha256 of
    every file under "files"; those the block has put there itself are not computed again.

    Raises:
        UserError: the disk is full, or the place cannot be written to.
    """
    temporary = final.with_name(final.name + ".tmp")
    try:
        with _os_errors(final) as outcome:
            final.parent.mkdir(parents=True, exist_ok=True)
            if temporary.exists():
                shutil.rmtree(temporary)
            temporary.mkdir()
            yield temporary
            _commit(temporary, final, manifest or {}, outcome)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def resumable_directory(final: Path, content: str, manifest: dict[str, Any]) -> Iterator[Path]:
    """As `committed_directory`, but what a process leaves behind that fails or dies is there for the next one.

    Args:
        final: the directory to be; must not exist.
        content: digest of all that decides what is written. What is left of another content is thrown away.
        manifest: see `committed_directory`.

    Raises:
        UserError: as `committed_directory`, or another process is writing there.
    """
    temporary = final.with_name(final.name + ".part")
    marker = temporary / ".content"
    with lock_directory(temporary) as lock, _os_errors(final, f"what is done stays in {temporary}") as outcome:
        if not marker.is_file() or marker.read_text() != content:
            for path in temporary.iterdir():
                if path.name != Path(lock.name).name:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_text_atomic(marker, content)
        yield temporary
        marker.unlink()
        Path(lock.name).unlink()
        _commit(temporary, final, manifest, outcome)


@contextlib.contextmanager
def _os_errors(final: Path, otherwise: str = "nothing was changed") -> Iterator[list[str]]:
    """Turns an OSError into a UserError that says what is there: the last text of the list it yields."""
    outcome = [otherwise]
    try:
        yield outcome
    except OSError as error:
        raise UserError(f"{final}: cannot be written: {error.strerror or error}; {outcome[-1]}") from error


def _commit(temporary: Path, final: Path, manifest: dict[str, Any], outcome: list[str]) -> None:
    """Bring a filled directory to disk and to its final name."""
    known, files = manifest.get("files", {}), {}
    for path in sorted(p for p in temporary.rglob("*") if p.is_file()):
        fsync(path)
        name = path.relative_to(temporary).as_posix()
        files[name] = known.get(name) or {"size": path.stat().st_size, "sha256": sha256_of(path)}
    write_json(temporary / MANIFEST, {**manifest, "files": files})
    fsync(temporary)
    if final.exists():
        _replace(final, temporary)
    else:
        temporary.rename(final)
    outcome.append("it is complete, but may not survive a power failure")
    fsync(final.parent)
    shutil.rmtree(_old(final), ignore_errors=True)


def _replace(final: Path, temporary: Path) -> None:
    """Put `temporary` where `final` is, which stays beside it as `.old`; on an error `final` is as it was."""
    old = _old(final)
    if old.exists():
        shutil.rmtree(old)
    try:
        final.rename(old)
        temporary.rename(final)
    except BaseException:
        if not final.exists():
            old.rename(final)
        raise


def _old(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def broken_file(directory: Path, check_hashes: bool = True) -> str | None:
    """What is wrong with a committed directory, or None when it is whole."""
    try:
        manifest = read_json_file(directory / MANIFEST)
    except UserError as error:
        return str(error)
    try:
        files = [(directory / name, entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()]
    except (TypeError, KeyError, AttributeError):
        return f"{directory / MANIFEST}: has no sizes and sha256 of files"
    for path, expected_size, expected_sha256 in files:
        if not path.is_file():
            return f"{path} is missing"
        try:
            size = path.stat().st_size
            if size != expected_size:
                return f"{path} has {size:,} bytes instead of {expected_size:,}"
            if check_hashes and sha256_of(path) != expected_sha256:
                return f"{path} does not have the sha256 it was written with"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
    return None


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a small file in one step. Raises UserError when it cannot be written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON and flush it to disk. Not atomic; for files of a directory that is not committed yet."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json_file(path: Path) -> Any:
    """Read JSON that a program wrote.

    Raises:
        UserError: it is missing or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON: {error}") from error


def lock_directory(directory: Path) -> IO[str]:
    """Make a directory and keep it for this process, as long as the returned file is open.

    Raises:
        UserError: another process has it, or it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")  # noqa: SIM115  (open as long as the lock is held)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written to: {error.strerror}; choose another output_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UserError(f"{directory}: another run is writing there; stop it, or choose another output_dir") from error
    return lock


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
