"""Commits a checkpoint of machines with node-local storage: each keeps the files of its ranks; all commit, or none.

On every machine `step-N` has the same manifest.json, of all files; `elsewhere.json` next to it lists those that are on
other machines, with machine and rank. Copied into one directory, the parts are the same checkpoint as on shared
storage.

    1. every machine writes, hashes and flushes its files in `step-N.tmp`, and sends their entries to rank 0
    2. rank 0 has the entries of all: it sends the manifest, and every other machine renames its directory
    3. all have done so: machine 0 renames its own, and names it `latest`
    4. only then every machine deletes older checkpoints

A crash before the end of 3 leaves parts without those of machine 0. A checkpoint is valid when each file of one
manifest is on some machine: so parts of two attempts at one step are never combined. See
`llmsuite.engine.local_storage`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    ELSEWHERE,
    MANIFEST,
    flush_files,
    os_errors,
    publish,
    read_manifest,
    remote_files,
    temporary_path,
    write_json,
)
from llmsuite.base.safe_files import copy_regular, exists, is_dir, is_file
from llmsuite.checkpoint.directory import list_steps
from llmsuite.checkpoint.tensor_writer import ManifestPart
from llmsuite.launch.leaders import Leaders

_OURS = ".joined_directory"
"""Link that marks a directory made by `joined_directory`: no other directory is deleted."""


@dataclasses.dataclass(frozen=True)
class LocalStorage:
    """This machine, in a run whose machines have their own output_dir."""

    machine: int
    ranks: Sequence[Sequence[int]]
    """Ranks of each machine; the first of them is its lead rank."""
    leaders: Leaders | None
    """Connections between lead ranks; None on other ranks."""
    group: Any = None
    """Process group of lead ranks; None on other ranks."""

    @property
    def own_ranks(self) -> Sequence[int]:
        return self.ranks[self.machine]


Entries = dict[str, dict[str, Any]]
"""Files or tensors of a manifest by name."""


def commit(
    final: Path, manifest: Mapping[str, Any], disk: LocalStorage, write: Callable[[Path], Mapping[int, ManifestPart]]
) -> None:
    """Write this machine's part of a checkpoint and commit it together with the others.

    The lead rank of every machine calls it, after `begin`.

    Args:
        final: directory of the checkpoint, on this machine.
        manifest: its entries other than files and tensors.
        disk: this machine.
        write: writes the part into a directory, and returns the entries of the tensor files that each rank has written.

    Raises:
        UserError: one of the machines cannot write its part, or has disconnected. Then the checkpoint is not valid, and
            this machine has no part of it, unless all had written theirs.
    """
    with _together(disk), _unfinished(final) as (directory, outcome):
        parts = write(directory)
        tensor_entries = _merge_entries([dataclasses.asdict(part) for part in parts.values()])
        lead = disk.own_ranks[0]
        rank_of = {name: rank for rank, part in parts.items() for name in part.files}
        # flushed before rank 0 has their entries: the manifest must not name a file that a crash can lose
        files = flush_files(directory, tensor_entries["files"])
        ranks = {name: rank_of.get(name, lead) for name in files}
        mine = {"files": files, "tensors": tensor_entries["tensors"], "ranks": ranks}
        agreed = _gather_entries(mine, disk) if disk.machine == 0 else _send_entries(mine, disk)
        # the manifest is written last: a directory without one is no checkpoint
        write_json(directory / MANIFEST, {**manifest, "files": agreed["files"], "tensors": agreed["tensors"]})
        away = {name: place for name, place in agreed["places"].items() if place["machine"] != disk.machine}
        write_json(directory / ELSEWHERE, {"machine": disk.machine, "files": away})
        if disk.machine == 0:
            # machine 0 renames last: when its part has its name, the parts of all others have theirs
            _wait_for_all(disk)
        publish(directory, final, outcome)
        if disk.machine != 0:
            _leaders(disk).send(0, {"is_done": True})


def announce_kept(disk: LocalStorage, kept: Sequence[str]) -> None:
    """On rank 0: send all machines the checkpoints to keep, when the new one is complete on all of them."""
    for machine in _leaders(disk).machines:
        _leaders(disk).send(machine, {"kept": list(kept)})


def receive_kept(disk: LocalStorage) -> list[str]:
    """On other lead ranks: wait until the new checkpoint is complete on all machines. Returns those to keep."""
    kept: list[str] = _receive(disk, 0)["kept"]
    return kept


def _gather_entries(mine: dict[str, Any], disk: LocalStorage) -> dict[str, Any]:
    """On machine 0: gather the entries of all machines, and send the result to all."""
    parts = [mine, *(_receive(disk, machine) for machine in _leaders(disk).machines)]
    places = {
        name: {"machine": machine, "rank": part["ranks"][name]}
        for machine, part in enumerate(parts)
        for name in part["files"]
    }
    assert len(places) == sum(len(part["files"]) for part in parts), "two machines have written a file of one name"
    agreed = {**_merge_entries(parts), "places": dict(sorted(places.items()))}
    for machine in _leaders(disk).machines:
        _leaders(disk).send(machine, agreed)
    return agreed


def _send_entries(mine: dict[str, Any], disk: LocalStorage) -> dict[str, Any]:
    """On other machines: send the entries of this machine, and receive those of all."""
    _leaders(disk).send(0, mine)
    agreed: dict[str, Any] = _receive(disk, 0)
    return agreed


def _wait_for_all(disk: LocalStorage) -> None:
    for machine in _leaders(disk).machines:
        assert _receive(disk, machine)["is_done"]


def _merge_entries(parts: Sequence[Mapping[str, Any]]) -> dict[str, Entries]:
    """Merge the entries of several parts, sorted by name as for one directory."""
    merged: dict[str, Entries] = {}
    for kind in ("files", "tensors"):
        entries: Entries = {}
        for part in parts:
            entries.update(part[kind])
        merged[kind] = dict(sorted(entries.items()))
    return merged


def _receive(disk: LocalStorage, machine: int) -> Any:
    message = _leaders(disk).receive(machine)
    if "error" in message:
        raise _RemoteError(message["error"])
    return message


def _leaders(disk: LocalStorage) -> Leaders:
    assert disk.leaders is not None, "only lead ranks exchange messages"
    return disk.leaders


class _RemoteError(UserError):
    """An error of another machine."""


@contextlib.contextmanager
def _together(disk: LocalStorage) -> Iterator[None]:
    """Send an error of this machine to the others, so that all of them fail."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, _RemoteError):
            text = str(error)
        else:
            text = f"machine {disk.machine}: {error or type(error).__name__}"
        for machine in _leaders(disk).machines:
            with contextlib.suppress(UserError):  # a machine that has disconnected
                _leaders(disk).send(machine, {"error": text})
        raise


@contextlib.contextmanager
def _unfinished(final: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the temporary directory of a checkpoint, which is deleted after an error."""
    try:
        with os_errors(final) as outcome:
            yield temporary_path(final), outcome
    finally:
        shutil.rmtree(temporary_path(final), ignore_errors=True)


@contextlib.contextmanager
def joined_directory(paths: Sequence[Path], place: Path) -> Iterator[Path]:
    """Make a directory with all files of a checkpoint whose parts are in several directories.

    Tensor files are linked. Small files are copied, as a model directory has to contain its own.

    Args:
        paths: checkpoints, or runs, of which the newest checkpoint with parts in all of them is taken.
        place: the directory to make; it is removed at the end.

    Raises:
        UserError: they are not the parts of one checkpoint, or some are missing.
    """
    are_runs = all(is_dir(path / "checkpoints") for path in paths)
    steps = {step for path in paths for step, _ in list_steps(path / "checkpoints")} if are_runs else {0}
    faults = []
    for step in sorted(steps, reverse=True):
        directories = paths
        if are_runs:
            directories = [path / "checkpoints" / f"step-{step}" for path in paths]
        found = _find_files(directories)
        if isinstance(found, str):
            faults.append(found)
            continue
        _remove_joined(place)
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
            _remove_joined(place)
        return
    raise UserError(faults[0] if faults else f"{paths[0]}: has no checkpoints")


def _find_files(paths: Sequence[Path]) -> dict[str, Path] | str:
    """Return the path of each file of a checkpoint, or the reason why the directories are not the parts of one."""
    there = [path for path in paths if is_file(path / MANIFEST)]
    if not there:
        return f"{paths[0]}: has no {MANIFEST}; name parts of a checkpoint, or runs that have them"
    first, *others = ((path / MANIFEST).read_bytes() for path in there)
    differing = [path for path, text in zip(there[1:], others) if text != first]
    if differing:
        return f"{differing[0]}: is no part of the same checkpoint as {there[0]}: their {MANIFEST} differ"
    found = {MANIFEST: there[0] / MANIFEST}
    for name in (path.name for path in read_manifest(there[0])):
        holding = [path for path in there if is_file(path / name)]
        if not holding:
            wrote = next((p for path in there if (p := remote_files(path).get(name)) is not None), None)
            who = ""
            if wrote:
                who = f"; rank {wrote['rank']} wrote it on machine {wrote['machine']}"
            return f"{there[0].name}: none of the directories has {name}{who}"
        found[name] = holding[0] / name
    return found


def _remove_joined(place: Path) -> None:
    """Delete a directory made by `joined_directory`. Raises UserError when it is another one."""
    if not exists(place):
        return
    if not (place / _OURS).is_symlink() and any(place.iterdir()):
        raise UserError(f"{place}: is in the way; move it, or choose another --output")
    shutil.rmtree(place)
