"""Machines that share no output_dir: noticed when a run begins; and the checkpoint they go on from, brought together.

`llmsuite.checkpoint.own_disks` has how such checkpoints are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.directory import list_steps, remove_unfinished
from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.errors import UserError
from llmsuite.files import (
    ELSEWHERE,
    MANIFEST,
    begin_directory,
    first_fault,
    fsync,
    lock_directory,
    lying_elsewhere,
    os_errors,
    publish,
    ranges_of,
    temporary_of,
    write_text_atomic,
)
from llmsuite.launch.leaders import accept, connect, listen
from llmsuite.parallel import collective
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.schema.section import as_plain
from llmsuite.train.output import recipe_text

_SEEN_SECONDS = 2.0
"""How long a file that another machine has written may take to appear here."""
_CHUNK = 4 << 20
_KEY_WORDS = 4


def find_own_disk(output_dir: Path, num_machines: int) -> OwnDisk | None:
    """This machine, if every machine has an output_dir of its own; None if all see the same. Every rank calls it.

    Raises:
        UserError: some machines share it and some do not, or it cannot be written to.
    """
    if num_machines == 1:
        return None
    local = [int(of_rank) for (of_rank,) in collective.from_all_ranks([collective.local_rank()])]
    starts = [rank for rank, number in enumerate(local) if number == 0]
    ranks = [range(start, end) for start, end in zip(starts, [*starts[1:], len(local)])]
    machine = next(number for number, of in enumerate(ranks) if collective.rank() in of)
    seen = _see_each_other(output_dir, machine, starts)
    if all(all(row) for row in seen):
        return None
    if any(seen[i][j] != (i == j) for i in range(len(ranks)) for j in range(len(ranks))):
        sees = "; ".join(f"machine {i} sees that of {_listed(row)}" for i, row in enumerate(seen))
        raise UserError(
            f"output_dir: {output_dir} is shared by some of the machines ({sees}); it has to be one directory for all "
            "of them, or for each a directory of its own"
        )
    report("the machines share no output_dir: each keeps the part of a checkpoint that its ranks write")
    return OwnDisk(machine, ranks, _meet(machine, ranks))


def _see_each_other(output_dir: Path, machine: int, starts: Sequence[int]) -> list[list[bool]]:
    """For each machine, which machines' files it sees in `output_dir`."""
    name = f".machine-{int(collective.from_first_rank([secrets.randbelow(1 << 52)])[0]):x}"
    paths = [output_dir / f"{name}-{number}" for number in range(len(starts))]
    is_first = collective.rank() == starts[machine]
    if is_first:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            paths[machine].touch()
        except OSError as error:
            raise UserError(f"machine {machine}: {output_dir}: cannot be written to: {error.strerror}") from error
    collective.barrier()
    deadline, found = time.monotonic() + _SEEN_SECONDS, [False] * len(paths)
    while is_first and not all(found := [path.exists() for path in paths]) and time.monotonic() < deadline:
        time.sleep(0.05)
    seen = collective.from_all_ranks([float(is_there) for is_there in found])
    if is_first:
        paths[machine].unlink(missing_ok=True)
    return [[value > 0 for value in seen[start]] for start in starts]


def _listed(row: Sequence[bool]) -> str:
    return ", ".join(str(number) for number, is_seen in enumerate(row) if is_seen) or "none"


def _meet(machine: int, ranks: Sequence[Sequence[int]]) -> Any:
    """The connections of this rank, if it leads its machine."""
    host = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[0]
    words = [secrets.randbelow(1 << 32) for _ in range(_KEY_WORDS)]
    words = [int(word) for word in collective.from_first_rank([float(word) for word in words])]
    key = b"".join(word.to_bytes(4, "little") for word in words)
    listener = listen(host, key, len(ranks)) if collective.rank() == 0 else None
    port = int(collective.from_first_rank([listener.address[1] if listener else 0])[0])
    if listener is not None:
        return accept(listener, len(ranks) - 1)
    return connect(host, port, key, machine) if collective.rank() == ranks[machine][0] else None


def take_directory(plan: RunPlan, disk: OwnDisk, resume: bool) -> AbstractContextManager[Any]:
    """Lock output_dir on a machine whose rank 0 is elsewhere, and keep the recipe there, as rank 0 does on its own.

    Raises:
        UserError: another run is writing there, or this one is new and there are checkpoints.
    """
    if disk.machine == 0 or not _leads(disk):
        return contextlib.nullcontext()
    lock = lock_directory(plan.output_dir)
    if not resume:
        plan.check_output()
    write_text_atomic(plan.output_dir / "recipe.json", recipe_text(as_plain(plan.recipe)))
    return lock


# going on from a checkpoint


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a machine has of a checkpoint."""

    manifest: str
    """Sha256 of its manifest.json, which is the same on all machines; empty where it has none."""
    files: list[str]
    """Those that are here and as they were written."""
    faults: list[str]
    elsewhere: dict[str, dict[str, int]]


def find_on_disks(checkpoints: Path, disk: OwnDisk) -> Path | None:
    """The newest checkpoint that the machines have together, which is then whole on each; None when none was ever
    complete. Every rank calls it.

    Raises:
        UserError: there are some, and none is whole.
    """
    mine: dict[str, Any] = {}
    if _leads(disk):
        remove_unfinished(checkpoints)
        # no machine has this file before the first checkpoint is complete on all
        had_one = (checkpoints / "latest").is_file()
        mine = {"steps": [step for step, _ in list_steps(checkpoints)], "had_one": had_one}
    found = _from_machines(disk, mine)
    faults = []
    for step in sorted({step for of_one in found for step in of_one["steps"]}, reverse=True):
        path = checkpoints / f"step-{step}"
        fault = fetch_parts(path, disk, is_needed=False)
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


def fetch_parts(path: Path, disk: OwnDisk, is_needed: bool = True) -> str | None:
    """Bring a checkpoint together: each machine gets the files that it lacks from one that has them, a few MB at a
    time. Every rank calls it.

    Returns:
        Why it is not whole; None when it is.

    Raises:
        UserError: it `is_needed` and not whole, or this machine cannot write it.
    """
    parts = [_Part(**part) for part in _from_machines(disk, dataclasses.asdict(_look(path)) if _leads(disk) else None)]
    faults = [f"machine {number}: {fault}" for number, part in enumerate(parts) for fault in part.faults]
    reason = "; ".join(faults[:1]) or f"{path} is on no machine"
    for digest in sorted({part.manifest for part in parts} - {""}):
        held = [set(part.files) if part.manifest == digest else set[str]() for part in parts]
        first = next(number for number, part in enumerate(parts) if part.manifest == digest)
        text = (path / MANIFEST).read_bytes() if _is_lead_of(first, disk) else None
        manifest = _bytes_of_machine(first, text, disk)
        files = ranges_of(json.loads(manifest))
        missing = [name for name in files if not any(name in of_one for of_one in held)]
        if not missing:
            _exchange(path, manifest, held, disk)
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


def _exchange(path: Path, manifest: bytes, held: Sequence[set[str]], disk: OwnDisk) -> None:
    """Send every file that a machine lacks, and put it there."""
    files = ranges_of(json.loads(manifest))
    lacking = [sorted(files.keys() - of_one) for of_one in held]
    if not any(lacking):
        return
    size = sum(files[name][-1].end for names in lacking for name in names)
    report(f"{path}: machines fetch {size / 1e6:,.1f} MB of it from each other")
    mine = lacking[disk.machine] if _leads(disk) else []
    with os_errors(path) as outcome:
        target = path
        if mine and not held[disk.machine]:  # nothing here belongs to it
            target = temporary_of(path)
            begin_directory(path)
            (target / MANIFEST).write_bytes(manifest)
            fsync(target / MANIFEST)
        for name in sorted({name for names in lacking for name in names}):
            source = random.Random(name).choice([number for number, of_one in enumerate(held) if name in of_one])
            _send(source, path / name, target / name if name in mine else None, files[name][-1].end, disk)
        fault = first_fault({target / name: files[name] for name in mine})
        if fault is not None:
            raise UserError(f"machine {disk.machine}: {fault}; it was whole on the machine that has it")
        if mine:
            (target / ELSEWHERE).unlink(missing_ok=True)
            fsync(target)
        if target != path:
            publish(target, path, outcome)
    collective.barrier()


def _send(source: int, path: Path, target: Path | None, size: int, disk: OwnDisk) -> None:
    """Write a file of one machine to `target` on those that lack it; a half of it never has its name."""
    chunks = _read(path) if _is_lead_of(source, disk) else None
    part = target.with_name(target.name + ".part") if target is not None else None
    if part is not None:
        part.unlink(missing_ok=True)
    for at in range(0, size, _CHUNK):
        own = next(chunks) if chunks is not None else None
        data = collective.bytes_of_rank(disk.ranks[source][0], min(_CHUNK, size - at), own)
        if part is not None:
            with open(part, "ab") as file:
                file.write(data)
    if part is not None and target is not None:
        part.touch()
        fsync(part)
        part.replace(target)


def _read(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            yield data


# talking


def _leads(disk: OwnDisk) -> bool:
    return _is_lead_of(disk.machine, disk)


def _is_lead_of(machine: int, disk: OwnDisk) -> bool:
    return collective.rank() == disk.ranks[machine][0]


def _from_machines(disk: OwnDisk, own: Any) -> list[Any]:
    """The JSON data of the leading rank of each machine, on every rank."""
    text = json.dumps(own).encode()
    return [
        json.loads(_bytes_of_machine(machine, text if _is_lead_of(machine, disk) else None, disk))
        for machine in range(len(disk.ranks))
    ]


def _bytes_of_machine(machine: int, data: bytes | None, disk: OwnDisk) -> bytes:
    source = disk.ranks[machine][0]
    sizes = collective.from_all_ranks([float(len(data)) if data is not None else 0.0])
    return collective.bytes_of_rank(source, int(sizes[source][0]), data)
