"""Directories that are written atomically.

A directory is filled under a temporary name, every file is flushed to disk, the manifest is written last, and a
rename makes it visible. A process that dies at any point leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.locks import LOCK, lock_directory, remove_path
from llmsuite.base.redaction import json_type_name
from llmsuite.base.safe_files import exists, is_dir, is_file, is_local_name, open_regular, read_regular
from llmsuite.base.strict_json import Kind, by_name, check_kinds, integer, parse_json
from llmsuite.base.threads import map_in_threads

MANIFEST = "manifest.json"
NOT_FETCHED = "not-fetched.json"
"""Name of the list, in a partly fetched checkpoint, of the tensors (`file:tensor`) whose bytes are holes."""
ELSEWHERE = "elsewhere.json"
"""Name of the list of files of a manifest that are on the disks of other machines, each with its machine and rank."""
REPLACED = ".llmsuite-old"
"""Suffix of a directory that is being replaced."""
NO_ROOM = "the run ends here; make room and --resume it"
"""The state of the files of a run, for `os_errors`."""
_CHUNK = 1 << 20
_SIZE = integer(0, 1 << 60)
_RANK = integer(0, 1 << 30)
_PLACE = Kind(
    "an object with the numbers machine and rank",
    lambda value: isinstance(value, dict) and all(_RANK.fits(value.get(key)) for key in ("machine", "rank")),
)
"""The machine and rank that have a file on their disk."""


def create_temporary(final: Path) -> None:
    """Make the empty temporary directory of `final`, for several processes to fill.

    Raises:
        UserError: the disk is full, or the directory cannot be written.
    """
    with os_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_path(temporary_path(final))
        temporary_path(final).mkdir()


def temporary_path(final: Path) -> Path:
    """The path of a directory until it is complete."""
    return final.with_name(final.name + ".tmp")


@contextlib.contextmanager
def published_directory(final: Path) -> Iterator[Path]:
    """A temporary directory that becomes `final` when the block succeeds, and is removed when it fails. A directory
    already at `final` is replaced.

    Raises:
        UserError: the disk is full, the directory cannot be written, or the temporary directory is not llmsuite's.
    """
    temporary = temporary_path(final)
    with claimed_directory(temporary, final):
        try:
            with os_errors(final) as outcome:
                remove_content(temporary)
                yield temporary
                publish(temporary, final, outcome)
        finally:
            with contextlib.suppress(OSError):
                remove_path(temporary)


@contextlib.contextmanager
def committed_directory(final: Path, manifest: dict[str, Any] | None = None) -> Iterator[Path]:
    """A variant of `published_directory` whose files are flushed to disk.

    `manifest` is written into it last, with the size and sha256 of every file under "files" (the format of
    `ranges_of`); entries that the block has set are not computed again.
    """
    with published_directory(final) as temporary:
        yield temporary
        _seal(temporary, manifest or {})


@contextlib.contextmanager
def committed_checkpoint(final: Path, manifest: dict[str, Any], is_created: bool) -> Iterator[Path]:
    """A variant of `committed_directory` for a directory whose neighbours are all of one run: what is in the way of
    the temporary directory is deleted. With `is_created` the caller has called `create_temporary`."""
    temporary = temporary_path(final)
    try:
        with os_errors(final) as outcome:
            if not is_created:
                create_temporary(final)
            yield temporary
            _seal(temporary, manifest)
            publish(temporary, final, outcome)
    finally:
        with contextlib.suppress(OSError):
            remove_path(temporary)


@contextlib.contextmanager
def claimed_directory(unfinished: Path, final: Path) -> Iterator[None]:
    """Context in which only this process writes into the unfinished directory of an output, which is made if needed.

    Its lock marks it as ours, until it is renamed to `final`: users give directories names such as `model.tmp` too, and
    these must not be deleted because an output is called `model`.

    Raises:
        UserError: another process writes there, or a directory or file of that name is not llmsuite's.
    """
    if os.path.lexists(unfinished) and not _is_unfinished(unfinished):
        raise UserError(
            f"{unfinished}: is in the way, and nothing that llmsuite has left; move it, or choose another output than "
            f"{final}"
        )
    with lock_directory(unfinished):
        yield
        with contextlib.suppress(OSError):  # it is no longer needed, and does no harm
            (final / LOCK).unlink(missing_ok=True)


def _is_unfinished(path: Path) -> bool:
    """True for a directory that is locked or was, or that is empty: a process that died had no time to lock it."""
    if path.is_symlink() or not is_dir(path):
        return False
    return is_file(path / LOCK) or next(path.iterdir(), None) is None


def remove_content(directory: Path) -> None:
    """Delete all that is in a claimed directory but its lock. Raises OSError."""
    for path in directory.iterdir():
        if path.name != LOCK:
            remove_path(path)


@contextlib.contextmanager
def resumable_directory(final: Path, content: str, manifest: dict[str, Any]) -> Iterator[Path]:
    """A variant of `committed_directory` that keeps finished files of a process that fails or dies for the next one.

    Args:
        final: the directory to write; must not exist.
        content: digest of everything that the files depend on. Files of another content are deleted.
        manifest: written last, with the files added.

    Raises:
        UserError: as `committed_directory`.
    """
    temporary = final.with_name(final.name + ".part")
    marker = temporary / ".content"
    with claimed_directory(temporary, final), os_errors(final, f"what is done stays in {temporary}") as outcome:
        if not is_file(marker) or marker.read_text() != content:
            remove_content(temporary)
            write_text_atomic(marker, content)
        yield temporary
        marker.unlink()
        _seal(temporary, manifest)
        publish(temporary, final, outcome)


@contextlib.contextmanager
def os_errors(final: Path, otherwise: str = "nothing was changed") -> Iterator[list[str]]:
    """Convert an OSError to a UserError that states the result for the files: the last text of the yielded list."""
    outcome = [otherwise]
    try:
        yield outcome
    except OSError as error:
        raise UserError(f"{final}: cannot be written: {error.strerror or error}; {outcome[-1]}") from error


def _seal(temporary: Path, manifest: dict[str, Any]) -> None:
    """Flush the files of a filled directory to disk, and write its manifest."""
    files = flush_files(temporary, manifest.get("files", {}))
    write_json(temporary / MANIFEST, {**manifest, "files": files})


def flush_files(directory: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Flush every file of a directory to disk, but its lock. Returns their manifest entries; files in `known` are not
    hashed."""
    files = {}
    for path in sorted(p for p in directory.rglob("*") if is_file(p) and p != directory / LOCK):
        fsync(path)
        name = path.relative_to(directory).as_posix()
        files[name] = known.get(name) or {"size": path.stat().st_size, "sha256": sha256_of(path)}
    return files


def publish(temporary: Path, final: Path, outcome: list[str]) -> None:
    """Rename a filled directory to its final name. `outcome` is the list of `os_errors`."""
    fsync(temporary)
    replaces = exists(final)
    if replaces:
        _replace(final, temporary)
    else:
        temporary.rename(final)
    outcome.append("it is complete, but may not survive a power failure")
    fsync(final.parent)
    if replaces:
        with contextlib.suppress(OSError):
            remove_path(backup_path(final))


def _replace(final: Path, temporary: Path) -> None:
    """Replace `final` by `temporary` and keep the old one at `backup_path`; on an error `final` is restored."""
    old = backup_path(final)
    remove_path(old)
    try:
        final.rename(old)
        temporary.rename(final)
    except BaseException:
        if not exists(final):
            old.rename(final)
        raise


def backup_path(final: Path) -> Path:
    """The place of a directory while it is replaced: no user has one of that name."""
    return final.with_name(final.name + REPLACED)


def broken_file(
    directory: Path, check_hashes: bool = True, without: str | None = None, here_only: bool = False
) -> str | None:
    """The first fault of a committed directory, None when it is intact. Files with the suffix `without` are not
    checked; with `here_only` neither are those of `ELSEWHERE`, which are on another machine."""
    try:
        files = read_manifest(directory)
        elsewhere = remote_files(directory)
    except UserError as error:
        return str(error)
    if elsewhere and not here_only:
        name, place = next(iter(elsewhere.items()))
        return (
            f"{directory} has the files of one machine only: rank {place['rank']} wrote {name} on machine "
            f"{place['machine']}; combine them with `llmsuite merge`, or copy them into one directory"
        )
    files = {path: ranges for path, ranges in files.items() if path.name not in elsewhere}
    return first_fault({p: ranges for p, ranges in files.items() if p.suffix != without}, check_hashes)


def check_intact(directory: Path) -> None:
    """Raise UserError if a directory has a manifest and differs from it."""
    fault = None
    if is_file(directory / MANIFEST):
        fault = broken_file(directory)
    if fault:
        raise UserError(f"{fault}; it is not what was saved: take another checkpoint, or copy it again")


def remote_files(directory: Path) -> dict[str, dict[str, int]]:
    """The files of a committed directory that are only on other machines: `machine` and `rank` by name."""
    if not is_file(directory / ELSEWHERE):
        return {}
    path = directory / ELSEWHERE
    files = read_json_object(path)
    check_kinds(path, files, {"files": by_name(_PLACE)})
    if odd := [name for name in files["files"] if not is_local_name(name, below=True)]:
        raise UserError(f"{path}: {odd[0][:300]!r} is no file of the directory")
    return {name: place for name, place in files["files"].items() if not is_file(directory / name)}


def first_fault(files: Mapping[Path, Sequence[Range]], check_hashes: bool = True) -> str | None:
    """The first fault of files that a manifest describes, None when they are intact."""
    for path, ranges in files.items():
        if not is_file(path):
            return f"{path} is missing"
        size = path.stat().st_size
        expected = ranges[-1].end
        if size != expected:
            return f"{path} has {size:,} bytes instead of {expected:,}"
    if check_hashes:
        return next(iter(_damaged_ranges(files)), None)
    return None


def damaged_tensors(directory: Path) -> list[str]:
    """The tensors, as `file:tensor`, that differ from manifest.json or cannot be read."""
    elsewhere = remote_files(directory)
    files: dict[Path, list[Range]] = {}
    for path, ranges in read_manifest(directory).items():
        if path.name not in elsewhere:
            files[path] = [r for r in ranges if r.tensor]
    return list(_damaged_ranges(files, lambda path, found, fault: f"{path.name}:{found.tensor}"))


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of bytes of a file, with the digest in the manifest."""

    start: int
    end: int
    sha256: str
    tensor: str | None = None
    """Name of the tensor; None for an entire file, or the header of a tensor file."""


def read_manifest(directory: Path) -> dict[Path, list[Range]]:
    """The files of a committed directory as ranges (`ranges_of`). Raises UserError when there is no manifest."""
    path = directory / MANIFEST
    manifest = read_json_object(path)
    try:
        return {directory / name: ranges for name, ranges in ranges_of(manifest).items()}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: has no sizes and sha256 of files: {error!r}") from error


def ranges_of(manifest: Mapping[str, Any]) -> dict[str, list[Range]]:
    """Each file of a manifest as ranges that cover it from its first to its last byte.

    Most files have one sha256 of all their bytes. A file with tensors has one of its header and one of each tensor, so
    that every byte is hashed once, and in any order.

    Raises:
        ValueError: or TypeError, KeyError, AttributeError: it is no manifest, or some byte is in no range.
    """
    if not all(_is_entry(entry) for kind in ("files", "tensors") for entry in manifest.get(kind, {}).values()):
        raise ValueError("an entry has no integer as size, or no text as sha256")
    tensors: dict[str, list[Range]] = {name: [] for name in manifest["files"]}
    for name, entry in manifest.get("tensors", {}).items():
        file, _, tensor = name.partition(":")
        if "header_sha256" in manifest["files"][file]:
            tensors[file].append(Range(entry["start"], entry["start"] + entry["size"], entry["sha256"], tensor))
    result = {}
    for file, entry in manifest["files"].items():
        if not is_local_name(file, below=True):
            raise ValueError(f"{file!r} is no file of the directory")
        ranges = sorted(tensors[file], key=lambda r: (r.start, r.end))
        size = entry["size"]
        if "header_sha256" in entry:
            ranges.insert(0, Range(0, ranges[0].start if ranges else size, entry["header_sha256"]))
        else:
            ranges = [Range(0, size, entry["sha256"])]
        ends = [0, *(r.end for r in ranges)]
        if ends[-1] != size or any(r.start != end for r, end in zip(ranges, ends)):
            raise ValueError(f"it does not cover every byte of {file}")
        result[file] = ranges
    return result


def _is_entry(entry: Mapping[str, Any]) -> bool:
    numbers = ("start", "size")
    texts = ("sha256", "header_sha256")
    return all(_SIZE.fits(entry[key]) for key in numbers if key in entry) and all(
        isinstance(entry[key], str) for key in texts if key in entry
    )


def _fault(path: Path, found: Range, why: str) -> str:
    return f"{path} {why}"


def _damaged_ranges(
    files: Mapping[Path, Sequence[Range]], name: Callable[[Path, Range, str], str] = _fault
) -> Iterator[str]:
    """The name of each range whose bytes have changed since it was written."""

    def check(place: tuple[Path, Range]) -> str | None:
        path, expected = place
        try:
            is_same = sha256_of(path, expected.start, expected.end) == expected.sha256
        except OSError as error:
            return name(path, expected, f"cannot be read: {error.strerror}")
        where = ""
        if expected.tensor:
            where = f" in tensor {expected.tensor}"
        if is_same:
            return None
        return name(path, expected, f"does not have the sha256 it was written with{where}")

    places = ((path, part) for path, parts in files.items() for part in parts)
    yield from (found for found in map_in_threads(check, places) if found is not None)


def check_disk(target: Path, needed: int, present: int = 0) -> None:
    """Raise UserError unless `needed` bytes fit onto the disk of a path, where `present` of them already are."""
    place = next((p for p in target.absolute().parents if is_dir(p)), Path("/"))
    free = shutil.disk_usage(place).free + present
    if needed > free:
        raise UserError(f"{target}: needs {needed / 1e9:,.1f} GB; {place} has {free / 1e9:,.1f} GB left")


def remove_directory(final: Path) -> None:
    """Delete a committed directory; under its name it is never incomplete. Raises OSError."""
    temporary = temporary_path(final)
    remove_path(temporary)
    final.rename(temporary)
    shutil.rmtree(temporary)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a small file in one step. Raises UserError when it cannot be written."""
    temporary = temporary_path(path)
    try:
        if temporary.is_symlink() or not is_file(temporary):
            remove_path(temporary)  # not a temporary file of this function
        with open(temporary, "w", encoding="utf-8", opener=_without_links) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    """Write JSON and flush it to disk. Not atomic: for files of a directory that is not committed yet."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_json_file(path: Path) -> Any:
    """The content of a JSON file, parsed strictly by `parse_json` as the file may be untrusted.

    Raises:
        UserError: it is missing, no regular file, or not JSON.
    """
    try:
        return parse_json(read_regular(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that has to be an object. Raises UserError as `read_json_file` does, or for another
    kind of value."""
    found = read_json_file(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: is {json_type_name(found)}, not an object")
    return found


def read_json_object_if_there(path: Path) -> dict[str, Any]:
    """The content of a JSON file that has to be an object; empty where there is no file. Raises UserError as
    `read_json_object`."""
    if not is_file(path):
        return {}
    return read_json_object(path)


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from the index of a set of safetensors files. Raises UserError when it is no index, or
    names a file in another directory."""
    found = read_json_object(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise UserError(f"{index}: has no weight_map of names to files")
    for name in set(found.values()):
        if not is_local_name(name):
            raise UserError(f"{index}: {name[:300]!r} is not a plain file name")
    return found


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def fsync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, start: int = 0, end: int | None = None) -> str:
    """Hex digest of a file, or of the bytes of a range of it."""
    digest = hashlib.sha256()
    left = math.inf if end is None else end - start
    buffer = memoryview(bytearray(int(min(_CHUNK, left))))
    with open_regular(path, buffering=0) as file:
        file.seek(start)
        while left:
            count = file.readinto(buffer[: int(min(len(buffer), left))])
            if not count:  # the file is shorter
                break
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
