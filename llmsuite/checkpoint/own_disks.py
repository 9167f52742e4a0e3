"""A checkpoint of machines that share no directory: each keeps the files of its ranks, and all commit or none counts.

On every machine `step-N` has the same manifest.json, of all files; `elsewhere.json` beside it lists those that lie on
other machines, with machine and rank. Copied into one directory, the parts are the checkpoint that one disk would have.

    1. every machine writes, hashes and flushes its files in `step-N.tmp`, and tells rank 0 of them
    2. rank 0 has heard of all: it sends the manifest, and every other machine renames its directory
    3. all have done so: machine 0 renames its own, and names it `latest`
    4. only then every machine deletes older checkpoints

A crash before the end of 3 leaves parts without those of machine 0. A checkpoint counts when for each file of one
manifest there is a machine that has it: so parts of two attempts at one step are never taken for one. See
`llmsuite.train.own_disks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.directory import list_steps
from llmsuite.checkpoint.tensor_writer import ManifestPart
from llmsuite.errors import UserError
from llmsuite.files import (
    ELSEWHERE,
    MANIFEST,
    flush_files,
    lying_elsewhere,
    os_errors,
    publish,
    read_manifest,
    temporary_of,
    write_json,
)
from llmsuite.launch.leaders import Leaders
from llmsuite.regular import copy_regular, exists, is_dir, is_file

_OURS = ".gathered"
"""Link that a directory made by `gathered` has, so that nothing else is deleted."""


@dataclasses.dataclass(frozen=True)
class OwnDisk:
    """This machine, in a run whose machines share no output_dir."""

    machine: int
    ranks: Sequence[Sequence[int]]
    """Ranks of each machine; the first of them leads."""
    leaders: Leaders | None
    """What leading ranks agree over; None on the others."""
    group: Any = None
    """The process group of leading ranks; None on the others."""

    @property
    def own_ranks(self) -> Sequence[int]:
        return self.ranks[self.machine]


Entries = dict[str, dict[str, Any]]
"""Files or tensors of a manifest by name."""


def commit(
    final: Path, manifest: Mapping[str, Any], disk: OwnDisk, write: Callable[[Path], Mapping[int, ManifestPart]]
) -> None:
    """Write this machine's part of a checkpoint and commit it together with the others. The leading rank of every
    machine calls it, once the directory has been begun.

    Args:
        final: directory of the checkpoint, on this machine.
        manifest: what it says besides files and tensors.
        disk: this machine.
        write: writes the part into a directory, and returns the entries of the tensor files that each rank has written.

    Raises:
        UserError: one of the machines cannot write its part, or is gone. The checkpoint does not count then, and this
            machine has nothing of it, unless all had written theirs.
    """
    with _together(disk), _unfinished(final) as (directory, outcome):
        parts = write(directory)
        known = _joined([dataclasses.asdict(part) for part in parts.values()])
        lead = disk.own_ranks[0]
        rank_of = {name: rank for rank, part in parts.items() for name in part.files}
        files = flush_files(directory, known["files"])
        mine = {"files": files, "tensors": known["tensors"], "ranks": {n: rank_of.get(n, lead) for n in files}}
        agreed = _gather(mine, disk) if disk.machine == 0 else _offer(mine, disk)
        write_json(directory / MANIFEST, {**manifest, "files": agreed["files"], "tensors": agreed["tensors"]})
        away = {name: place for name, place in agreed["places"].items() if place["machine"] != disk.machine}
        write_json(directory / ELSEWHERE, {"machine": disk.machine, "files": away})
        if disk.machine == 0:
            _hear_of_all(disk)
        publish(directory, final, outcome)
        if disk.machine != 0:
            _leaders(disk).send(0, {"is_done": True})


def tell(disk: OwnDisk, kept: Sequence[str]) -> None:
    """On rank 0: the checkpoint is complete everywhere; these are to stay."""
    for machine in _leaders(disk).machines:
        _leaders(disk).send(machine, {"kept": list(kept)})


def hear(disk: OwnDisk) -> list[str]:
    """On the other leading ranks: the checkpoints that are to stay, when the new one is complete everywhere."""
    kept: list[str] = _receive(disk, 0)["kept"]
    return kept


def _gather(mine: dict[str, Any], disk: OwnDisk) -> dict[str, Any]:
    """The entries of all machines, which all of them get."""
    parts = [mine, *(_receive(disk, machine) for machine in _leaders(disk).machines)]
    places = {
        name: {"machine": machine, "rank": part["ranks"][name]}
        for machine, part in enumerate(parts)
        for name in part["files"]
    }
    assert len(places) == sum(len(part["files"]) for part in parts), "two machines have written a file of one name"
    agreed = {**_joined(parts), "places": dict(sorted(places.items()))}
    for machine in _leaders(disk).machines:
        _leaders(disk).send(machine, agreed)
    return agreed


def _offer(mine: dict[str, Any], disk: OwnDisk) -> dict[str, Any]:
    """The same on the other machines."""
    _leaders(disk).send(0, mine)
    agreed: dict[str, Any] = _receive(disk, 0)
    return agreed


def _hear_of_all(disk: OwnDisk) -> None:
    for machine in _leaders(disk).machines:
        assert _receive(disk, machine)["is_done"]


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Entries]:
    """The entries of several parts, in the order of one directory."""
    return {
        kind: dict(sorted((name, entry) for part in parts for name, entry in part[kind].items()))
        for kind in ("files", "tensors")
    }


def _receive(disk: OwnDisk, machine: int) -> Any:
    message = _leaders(disk).receive(machine)
    if "error" in message:
        raise _Elsewhere(message["error"])
    return message


def _leaders(disk: OwnDisk) -> Leaders:
    assert disk.leaders is not None, "only leading ranks agree"
    return disk.leaders


class _Elsewhere(UserError):
    """An error of another machine."""


@contextlib.contextmanager
def _together(disk: OwnDisk) -> Iterator[None]:
    """An error of this machine is one of all."""
    try:
        yield
    except BaseException as error:
        text = (
            str(error) if isinstance(error, _Elsewhere) else f"machine {disk.machine}: {error or type(error).__name__}"
        )
        for machine in _leaders(disk).machines:
            with contextlib.suppress(UserError):  # that one is gone
                _leaders(disk).send(machine, {"error": text})
        raise


@contextlib.contextmanager
def _unfinished(final: Path) -> Iterator[tuple[Path, list[str]]]:
    """The temporary directory of a checkpoint, which does not outlive an error."""
    try:
        with os_errors(final) as outcome:
            yield temporary_of(final), outcome
    finally:
        shutil.rmtree(temporary_of(final), ignore_errors=True)


# bringing parts together


@contextlib.contextmanager
def gathered(paths: Sequence[Path], place: Path) -> Iterator[Path]:
    """A directory with all files of a checkpoint whose parts lie in several directories: links to tensors, copies of
    the small ones, of which a model's directory has to have its own.

    Args:
        paths: checkpoints, or runs, of which the newest checkpoint is taken that they have together.
        place: the directory to make; it is removed at the end.

    Raises:
        UserError: they are not the parts of one checkpoint, or some are missing.
    """
    are_runs = all(is_dir(path / "checkpoints") for path in paths)
    steps = {step for path in paths for step, _ in list_steps(path / "checkpoints")} if are_runs else {0}
    faults = []
    for step in sorted(steps, reverse=True):
        found = _joined_files([path / "checkpoints" / f"step-{step}" for path in paths] if are_runs else paths)
        if isinstance(found, str):
            faults.append(found)
            continue
        _remove_gathered(place)
        try:
            with os_errors(place):
                place.mkdir(parents=True)
                (place / _OURS).symlink_to(paths[0].absolute())
                for name, path in found.items():
                    if path.suffix == ".safetensors":
                        (place / name).symlink_to(path.absolute())
                    else:
                        copy_regular(path, place / name)
            yield place
        finally:
            _remove_gathered(place)
        return
    raise UserError(faults[0] if faults else f"{paths[0]}: has no checkpoints")


def _joined_files(paths: Sequence[Path]) -> dict[str, Path] | str:
    """Where each file of a checkpoint lies, or why they are not the parts of one."""
    there = [path for path in paths if is_file(path / MANIFEST)]
    if not there:
        return f"{paths[0]}: has no {MANIFEST}; name parts of a checkpoint, or runs that have them"
    first, *others = ((path / MANIFEST).read_bytes() for path in there)
    if unlike := [path for path, text in zip(there[1:], others) if text != first]:
        return f"{unlike[0]}: is no part of the same checkpoint as {there[0]}: their {MANIFEST} differ"
    found = {MANIFEST: there[0] / MANIFEST}
    for name in (path.name for path in read_manifest(there[0])):
        holding = [path for path in there if is_file(path / name)]
        if not holding:
            wrote = next((p for path in there if (p := lying_elsewhere(path).get(name)) is not None), None)
            who = f"; rank {wrote['rank']} wrote it on machine {wrote['machine']}" if wrote else ""
            return f"{there[0].name}: none of the directories has {name}{who}"
        found[name] = holding[0] / name
    return found


def _remove_gathered(place: Path) -> None:
    """Delete what `gathered` has made. Raises UserError when it is something else."""
    if not exists(place):
        return
    if not (place / _OURS).is_symlink() and any(place.iterdir()):
        raise UserError(f"{place}: is in the way; move it, or choose another --output")
    shutil.rmtree(place)
