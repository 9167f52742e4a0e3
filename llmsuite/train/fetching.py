"""A checkpoint of machines that share no output_dir, brought together so far that each machine has what its ranks read.

Of files with tensors a machine fetches the tensors that its ranks ask for, of others the whole. They are put beside the
checkpoint, in `step-N.fetched`, together with links to what is here; in place of other tensors these files have holes,
and `not-fetched.json` names them, so that nobody takes a hole for values. It is removed when all ranks have read.
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

from llmsuite.checkpoint.directory import list_steps, remove_unfinished
from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.errors import UserError
from llmsuite.files import (
    MANIFEST,
    NOT_FETCHED,
    Range,
    first_fault,
    lying_elsewhere,
    os_errors,
    ranges_of,
    sha256_of,
    write_json,
)
from llmsuite.parallel import collective
from llmsuite.progress import report
from llmsuite.regular import is_dir, is_file
from llmsuite.train.own_disks import bytes_of_machine, from_machines, is_lead_of, leads

_CHUNK = 4 << 20
"""Bytes that one machine sends another at a time."""

Wants = Callable[[str, str], bool]
"""Whether this rank reads a tensor: the name of its file, and its own."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a machine has of a checkpoint."""

    manifest: str
    """Sha256 of its manifest.json, which is the same on all machines; empty where it has none."""
    files: list[str]
    """Those that are here and as they were written."""
    faults: list[str]
    elsewhere: dict[str, dict[str, int]]


def place_of(path: Path) -> Path:
    """Where the ranks of this machine read a checkpoint from, once it was fetched."""
    fetched = _fetched(path)
    return fetched if is_dir(fetched) else path


def _fetched(path: Path) -> Path:
    return path.with_name(path.name + ".fetched")


def find_on_disks(checkpoints: Path, disk: OwnDisk, wants: Wants) -> Path | None:
    """The newest checkpoint that the machines have together, to be read at `place_of`; None when none was ever
    complete. Every rank calls it."""
    mine: dict[str, Any] = {}
    if leads(disk):
        remove_unfinished(checkpoints)
        # no machine has this file before the first checkpoint is complete on all
        had_one = is_file(checkpoints / "latest")
        mine = {"steps": [step for step, _ in list_steps(checkpoints)], "had_one": had_one}
    found = from_machines(disk, mine)
    faults = []
    for step in sorted({step for of_one in found for step in of_one["steps"]}, reverse=True):
        path = checkpoints / f"step-{step}"
        fault = fetch_parts(path, disk, wants, is_needed=False)
        if fault is None:
            return path
        report(f"checkpoint {path} is passed over: {fault}")
        faults.append(fault)
    if any(of_one["had_one"] for of_one in found):
        lacking = faults[0] if faults else "there are no steps"
        raise UserError(
            f"{checkpoints}: the machines have no whole checkpoint, the newest lacks this: {lacking}; start all "
            "machines that wrote it, or move the directories away to start at step 0"
        )
    return None


@contextlib.contextmanager
def reading(path: Path, disk: OwnDisk | None) -> Iterator[Path]:
    """Where to read a checkpoint; what was fetched of it is removed when all ranks are through. Every rank calls it.

    Args:
        path: the checkpoint.
        disk: this machine, where machines share no output_dir and `fetch_parts` was called.
    """
    if disk is None:
        yield path
        return
    yield place_of(path)
    collective.barrier()
    if leads(disk):
        shutil.rmtree(_fetched(path), ignore_errors=True)


def fetch_parts(path: Path, disk: OwnDisk, wants: Wants, is_needed: bool = True) -> str | None:
    """Bring a checkpoint together: each machine gets what its ranks want and it lacks, from a machine that has it, a
    few MB at a time. Every rank calls it.

    Returns:
        Why it is not whole; None when it is.

    Raises:
        UserError: it `is_needed` and not whole, or this machine cannot write it.
    """
    parts = [_Part(**part) for part in from_machines(disk, dataclasses.asdict(_look(path)) if leads(disk) else None)]
    faults = [f"machine {number}: {fault}" for number, part in enumerate(parts) for fault in part.faults]
    reason = "; ".join(faults[:1]) or f"{path} is on no machine"
    for digest in sorted({part.manifest for part in parts} - {""}):
        held = [set(part.files) if part.manifest == digest else set[str]() for part in parts]
        first = next(number for number, part in enumerate(parts) if part.manifest == digest)
        text = (path / MANIFEST).read_bytes() if is_lead_of(first, disk) else None
        manifest = bytes_of_machine(first, text, disk)
        files = ranges_of(json.loads(manifest))
        missing = [name for name in files if not any(name in of_one for of_one in held)]
        if not missing:
            _exchange(path, manifest, held, disk, wants)
            return None
        reason = "; ".join([_nowhere(missing[0], parts), *faults[:1]])
    if is_needed:
        raise UserError(f"{path}: {reason}")
    return reason


def _nowhere(name: str, parts: Sequence[_Part]) -> str:
    """That no machine has a file, and who wrote it."""
    wrote = next((part.elsewhere[name] for part in parts if name in part.elsewhere), None)
    who = f"; rank {wrote['rank']} wrote it on machine {wrote['machine']}" if wrote else ""
    return f"no machine has {name}{who}"


def _look(path: Path) -> _Part:
    """What this machine has of a checkpoint, each file compared with the manifest."""
    try:
        text = (path / MANIFEST).read_bytes()
        files = ranges_of(json.loads(text))
        elsewhere = lying_elsewhere(path)
    except FileNotFoundError:
        return _Part("", [], [], {})
    except (OSError, UserError, ValueError, TypeError, KeyError, AttributeError) as error:
        return _Part("", [], [f"{path / MANIFEST} cannot be used: {error!r}"], {})
    whole, faults = [], []
    for name, ranges in files.items():
        if name in elsewhere:
            continue
        fault = first_fault({path / name: ranges})
        if fault is None:
            whole.append(name)
        else:
            faults.append(fault)
    return _Part(hashlib.sha256(text).hexdigest(), whole, faults, elsewhere)


# sending


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a file that a machine fetches."""

    file: str
    range: Range
    source: int
    """The machine that has it."""


def _exchange(path: Path, manifest: bytes, held: Sequence[set[str]], disk: OwnDisk, wants: Wants) -> None:
    """Send every machine what it lacks and its ranks want, and put it beside the checkpoint there."""
    files = ranges_of(json.loads(manifest))
    if all(files.keys() <= of_one for of_one in held):
        return
    needed = _needed(files, held, disk, wants)
    size = sum(piece.range.end - piece.range.start for pieces in needed for piece in pieces)
    whole = sum(ranges[-1].end for of_one in held for name, ranges in files.items() if name not in of_one)
    report(
        f"{path}: machines fetch {size / 1e6:,.1f} MB of it from each other, what their ranks read of the "
        f"{whole / 1e6:,.1f} MB that they lack"
    )
    target, own = _fetched(path), needed[disk.machine]
    with os_errors(path):
        if leads(disk) and files.keys() - held[disk.machine]:
            _begin(target, path, manifest, files, held[disk.machine], own)
        _send_all(path, target, needed, disk)
        if leads(disk):
            for piece in own:
                if sha256_of(target / piece.file, piece.range.start, piece.range.end) != piece.range.sha256:
                    what = piece.file if piece.range.tensor is None else f"{piece.file}: tensor {piece.range.tensor}"
                    raise UserError(
                        f"machine {disk.machine}: {target}: {what} does not have the sha256 of {MANIFEST}; it was "
                        f"whole on machine {piece.source}"
                    )
    collective.barrier()


def _needed(
    files: Mapping[str, Sequence[Range]], held: Sequence[set[str]], disk: OwnDisk, wants: Wants
) -> list[list[_Piece]]:
    """What each machine fetches, in an order that is the same everywhere."""
    ranges = [(name, of_file) for name in sorted(files) for of_file in files[name]]
    own = [float(of_file.tensor is None or wants(name, of_file.tensor)) for name, of_file in ranges]
    of_ranks = np.array(collective.from_all_ranks(own))
    found = []
    for machine, of_machine in enumerate(held):
        is_wanted = of_ranks[list(disk.ranks[machine])].max(0) > 0
        found.append(
            [
                _Piece(name, of_file, _source(name, held))
                for (name, of_file), wanted in zip(ranges, is_wanted)
                if wanted and name not in of_machine
            ]
        )
    return found


def _source(name: str, held: Sequence[set[str]]) -> int:
    return random.Random(name).choice([number for number, of_one in enumerate(held) if name in of_one])


def _begin(
    target: Path,
    path: Path,
    manifest: bytes,
    files: Mapping[str, Sequence[Range]],
    here: set[str],
    own: Sequence[_Piece],
) -> None:
    """The directory to read from: links to what is here, and files with holes for what comes."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / MANIFEST).write_bytes(manifest)
    coming = {(piece.file, piece.range.tensor) for piece in own}
    holes = []
    for name, ranges in files.items():
        if name in here:
            (target / name).symlink_to((path / name).absolute())
            continue
        with open(target / name, "wb") as file:
            file.truncate(ranges[-1].end)
        holes += [f"{name}:{r.tensor}" for r in ranges if (name, r.tensor) not in coming]
    write_json(target / NOT_FETCHED, holes)


def _send_all(path: Path, target: Path, needed: Sequence[Sequence[_Piece]], disk: OwnDisk) -> None:
    """Rounds in which every machine sends every other a chunk of what that fetches from it. Every rank takes part, also
    those that neither send nor receive, so that none waits for long."""
    machines = range(len(needed))
    streams = [[_Stream(p for p in needed[to] if p.source == of) for to in machines] for of in machines]
    sizes = np.array([[stream.size for stream in row] for row in streams])  # from each machine to each
    for at in range(0, int(sizes.max()), _CHUNK):
        now, own = np.clip(sizes - at, 0, _CHUNK).tolist(), disk.machine
        if leads(disk):
            data = b"".join(streams[own][to].read(path, now[own][to]) for to in machines)
            received = [now[of][own] for of in machines]
            found = collective.exchange_bytes(data, now[own], received, disk.group)
            for of, size in zip(machines, received):
                streams[of][own].write(target, found[:size])
                found = found[size:]
        collective.barrier()


class _Stream:
    """What one machine sends another: the bytes of pieces, one behind the other."""

    def __init__(self, pieces: Iterable[_Piece]):
        self._left = [(piece.file, piece.range.start, piece.range.end) for piece in pieces]
        self.size = sum(end - start for _, start, end in self._left)
        """Bytes of all pieces."""

    def _next(self, count: int) -> Iterator[tuple[str, int, int]]:
        """Files, and where in them the next so many bytes are."""
        while count:
            name, start, end = self._left.pop(0)
            if end - start > count:
                self._left.insert(0, (name, start + count, end))
                end = start + count
            count -= end - start
            yield name, start, end

    def read(self, directory: Path, count: int) -> bytes:
        """The next so many bytes."""
        found = []
        for name, start, end in self._next(count):
            with open(directory / name, "rb") as file:
                file.seek(start)
                found.append(file.read(end - start))
        return b"".join(found)

    def write(self, directory: Path, data: bytes) -> None:
        """Put the next bytes into files that are there."""
        view = memoryview(data)
        for name, start, end in self._next(len(data)):
            with open(directory / name, "r+b") as file:
                file.seek(start)
                file.write(view[: end - start])
            view = view[end - start :]
