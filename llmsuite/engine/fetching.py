"""Exchange of checkpoint files between machines that share no output_dir: each fetches what its ranks read.

From files with tensors a machine fetches the tensors that its ranks need, other files completely. They are written next
to the checkpoint, to `step-N.fetched`, together with links to the local files. Tensors that are not fetched are holes
in these files, listed in `not-fetched.json`, so that no hole is read as values. The directory is removed when all ranks
have read the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    MANIFEST,
    NOT_FETCHED,
    Range,
    first_fault,
    os_errors,
    ranges_of,
    remote_files,
    sha256_of,
    write_json,
)
from llmsuite.base.progress import report
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.checkpoint.directory import list_steps, remove_unfinished
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.engine.local_storage import broadcast_from_machine, gather_from_machines, leads, leads_machine
from llmsuite.parallel import collective

_CHUNK = 4 << 20
"""Bytes that one machine sends to another in one message."""

NeedsTensor = Callable[[str, str], bool]
"""Predicate: True if this rank reads a tensor, given the name of its file and of the tensor."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Local state of a checkpoint on one machine."""

    manifest: str
    """Sha256 of manifest.json, which is the same on all machines; empty where the machine has none."""
    files: list[str]
    """Files on this machine that match the manifest."""
    faults: list[str]
    """Messages about files that do not match it."""
    elsewhere: dict[str, dict[str, int]]
    """Machine and rank that wrote each of the other files."""


def readable_path(path: Path) -> Path:
    """Return the directory that the ranks of this machine read a checkpoint from, after it was fetched."""
    fetched = _fetched_path(path)
    return fetched if is_dir(fetched) else path


def _fetched_path(path: Path) -> Path:
    return path.with_name(path.name + ".fetched")


def find_on_local_storage(checkpoints: Path, disk: LocalStorage, needs: NeedsTensor) -> Path | None:
    """Find and fetch the newest checkpoint whose files the machines have together, to be read at `readable_path`; None
    when none was ever complete. A collective call."""
    mine: dict[str, Any] = {}
    if leads(disk):
        remove_unfinished(checkpoints)
        # this file exists only after the first checkpoint was complete on all machines
        had_one = is_file(checkpoints / "latest")
        mine = {"steps": [step for step, _ in list_steps(checkpoints)], "had_one": had_one}
    by_machine = gather_from_machines(disk, mine)
    faults = []
    steps = {step for machine in by_machine for step in machine["steps"]}
    for step in sorted(steps, reverse=True):
        path = checkpoints / f"step-{step}"
        fault = fetch_missing(path, disk, needs, is_needed=False)
        if fault is None:
            return path
        report(f"checkpoint {path} is skipped: {fault}")
        faults.append(fault)
    if any(machine["had_one"] for machine in by_machine):
        reason = faults[0] if faults else "there are no steps"
        raise UserError(
            f"{checkpoints}: the machines have no complete checkpoint; the newest is incomplete: {reason}; start all "
            "machines that wrote it, or move the directories away to start at step 0"
        )
    return None


@contextlib.contextmanager
def fetched_checkpoint(path: Path, disk: LocalStorage | None) -> Iterator[Path]:
    """Context with the directory to read a checkpoint from; fetched files are removed when all ranks leave it. A
    collective call.

    Args:
        path: path of the checkpoint.
        disk: this machine, where machines share no output_dir and `fetch_missing` was called.
    """
    if disk is None:
        yield path
        return
    yield readable_path(path)
    collective.barrier()  # all ranks of the machine have read the files
    if leads(disk):
        shutil.rmtree(_fetched_path(path), ignore_errors=True)


def fetch_missing(path: Path, disk: LocalStorage, needs: NeedsTensor, is_needed: bool = True) -> str | None:
    """Fetch the missing parts of a checkpoint: each machine gets what its ranks need from a machine that has it, a few
    MB at a time. A collective call.

    Returns:
        The reason why the checkpoint is incomplete; None when it is complete.

    Raises:
        UserError: the checkpoint `is_needed` and incomplete, or this machine cannot write it.
    """
    mine = dataclasses.asdict(_check_local(path)) if leads(disk) else None
    parts = [_Part(**part) for part in gather_from_machines(disk, mine)]
    faults = [f"machine {number}: {fault}" for number, part in enumerate(parts) for fault in part.faults]
    reason = "; ".join(faults[:1]) or f"{path} is on no machine"
    for digest in sorted({part.manifest for part in parts} - {""}):
        held = [set(part.files) if part.manifest == digest else set[str]() for part in parts]
        first = next(number for number, part in enumerate(parts) if part.manifest == digest)
        text = (path / MANIFEST).read_bytes() if leads_machine(first, disk) else None
        manifest = broadcast_from_machine(first, text, disk)
        files = ranges_of(json.loads(manifest))
        available = set[str]().union(*held)
        missing = [name for name in files if name not in available]
        if not missing:
            _exchange(path, manifest, held, disk, needs)
            return None
        reason = "; ".join([_missing_file_message(missing[0], parts), *faults[:1]])
    if is_needed:
        raise UserError(f"{path}: {reason}")
    return reason


def _missing_file_message(name: str, parts: Sequence[_Part]) -> str:
    """Return the message that no machine has a file, with the rank that wrote it."""
    wrote = next((part.elsewhere[name] for part in parts if name in part.elsewhere), None)
    who = f"; rank {wrote['rank']} wrote it on machine {wrote['machine']}" if wrote else ""
    return f"no machine has {name}{who}"


def _check_local(path: Path) -> _Part:
    """Compare each file of a checkpoint on this machine with the manifest."""
    try:
        text = (path / MANIFEST).read_bytes()
        files = ranges_of(json.loads(text))
        elsewhere = remote_files(path)
    except FileNotFoundError:
        return _Part("", [], [], {})
    except (OSError, UserError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _Part("", [], [f"{path / MANIFEST} cannot be used: {error!r}"], {})
    intact = []
    faults = []
    for name, ranges in files.items():
        if name in elsewhere:
            continue
        fault = first_fault({path / name: ranges})
        if fault is None:
            intact.append(name)
        else:
            faults.append(fault)
    return _Part(hashlib.sha256(text).hexdigest(), intact, faults, elsewhere)


# exchange


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Range of a file that a machine fetches."""

    file: str
    range: Range
    source: int
    """Number of the machine that sends it."""


def _exchange(path: Path, manifest: bytes, held: Sequence[set[str]], disk: LocalStorage, needs: NeedsTensor) -> None:
    """Send every machine the missing tensors that its ranks need, and write them next to its checkpoint."""
    files = ranges_of(json.loads(manifest))
    if all(files.keys() <= names for names in held):
        return
    needed = _needed(files, held, disk, needs)
    size = sum(piece.range.end - piece.range.start for pieces in needed for piece in pieces)
    missing_bytes = sum(ranges[-1].end for names in held for name, ranges in files.items() if name not in names)
    report(
        f"{path}: machines fetch {size / 1e6:,.1f} MB of it from each other, what their ranks read of the "
        f"{missing_bytes / 1e6:,.1f} MB that they lack"
    )
    target = _fetched_path(path)
    own = needed[disk.machine]
    with os_errors(path):
        if leads(disk) and files.keys() - held[disk.machine]:
            _create_files(target, path, manifest, files, held[disk.machine], own)
        _send_all(path, target, needed, disk)
        if leads(disk):
            for piece in own:
                if sha256_of(target / piece.file, piece.range.start, piece.range.end) != piece.range.sha256:
                    what = piece.file if piece.range.tensor is None else f"{piece.file}: tensor {piece.range.tensor}"
                    raise UserError(
                        f"machine {disk.machine}: {target}: {what} does not have the sha256 of {MANIFEST}; it was "
                        f"intact on machine {piece.source}"
                    )
    collective.barrier()  # ranks of this machine read the files only after its lead has written them


def _needed(
    files: Mapping[str, Sequence[Range]], held: Sequence[set[str]], disk: LocalStorage, needs: NeedsTensor
) -> list[list[_Piece]]:
    """Return the pieces that each machine fetches, in the same order on all ranks."""
    ranges = [(name, range_) for name in sorted(files) for range_ in files[name]]
    own = [float(range_.tensor is None or needs(name, range_.tensor)) for name, range_ in ranges]
    by_rank = np.array(collective.all_gather_floats(own))
    needed = []
    for machine, names in enumerate(held):
        is_needed = by_rank[list(disk.ranks[machine])].max(0) > 0
        pieces = []
        for (name, range_), needed_here in zip(ranges, is_needed):
            if needed_here and name not in names:
                pieces.append(_Piece(name, range_, _source(name, held)))
        needed.append(pieces)
    return needed


def _source(name: str, held: Sequence[set[str]]) -> int:
    """Choose a machine that has a file: pseudo-random by the name, so the same on all ranks, and evenly distributed."""
    return random.Random(name).choice([number for number, names in enumerate(held) if name in names])


def _create_files(
    target: Path,
    path: Path,
    manifest: bytes,
    files: Mapping[str, Sequence[Range]],
    here: set[str],
    own: Sequence[_Piece],
) -> None:
    """Create the directory to read from: links to local files, and files with holes for the pieces to come."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / MANIFEST).write_bytes(manifest)
    expected = {(piece.file, piece.range.tensor) for piece in own}
    holes = []
    for name, ranges in files.items():
        if name in here:
            (target / name).symlink_to((path / name).absolute())
            continue
        with open(target / name, "wb") as file:
            file.truncate(ranges[-1].end)
        holes += [f"{name}:{r.tensor}" for r in ranges if (name, r.tensor) not in expected]
    write_json(target / NOT_FETCHED, holes)


def _send_all(path: Path, target: Path, needed: Sequence[Sequence[_Piece]], disk: LocalStorage) -> None:
    """Exchange the pieces in rounds, in which every machine sends a chunk to every other one. The barrier after each
    round includes ranks that neither send nor receive, so that none of them waits longer than its timeout."""
    machines = range(len(needed))
    streams: list[list[_Stream]] = []  # by sender and receiver
    for sender in machines:
        row = []
        for receiver in machines:
            row.append(_Stream(piece for piece in needed[receiver] if piece.source == sender))
        streams.append(row)
    sizes = np.zeros([len(needed), len(needed)], "int64")
    for sender in machines:
        sizes[sender] = [stream.size for stream in streams[sender]]
    for offset in range(0, int(sizes.max()), _CHUNK):
        chunk_sizes = np.clip(sizes - offset, 0, _CHUNK).tolist()
        own = disk.machine
        if leads(disk):
            data = b"".join(streams[own][to].read(path, chunk_sizes[own][to]) for to in machines)
            received_sizes = [chunk_sizes[sender][own] for sender in machines]
            received = collective.all_to_all_bytes(data, chunk_sizes[own], received_sizes, disk.group)
            for sender, size in zip(machines, received_sizes):
                streams[sender][own].write(target, received[:size])
                received = received[size:]
        collective.barrier()


class _Stream:
    """Byte stream from one machine to another: the concatenated pieces."""

    def __init__(self, pieces: Iterable[_Piece]):
        self._ranges = [(piece.file, piece.range.start, piece.range.end) for piece in pieces]
        self.size = sum(end - start for _, start, end in self._ranges)
        """Total number of bytes."""

    def _next(self, count: int) -> Iterator[tuple[str, int, int]]:
        """Iterate over the file ranges of the next `count` bytes."""
        while count:
            name, start, end = self._ranges.pop(0)
            if end - start > count:
                self._ranges.insert(0, (name, start + count, end))
                end = start + count
            count -= end - start
            yield name, start, end

    def read(self, directory: Path, count: int) -> bytes:
        """Read the next `count` bytes."""
        chunks = []
        for name, start, end in self._next(count):
            with open(directory / name, "rb") as file:
                file.seek(start)
                chunks.append(file.read(end - start))
        return b"".join(chunks)

    def write(self, directory: Path, data: bytes) -> None:
        """Write the next bytes into existing files."""
        view = memoryview(data)
        for name, start, end in self._next(len(data)):
            with open(directory / name, "r+b") as file:
                file.seek(start)
                file.write(view[: end - start])
            view = view[end - start :]
