"""Machines that share no output_dir: noticed when a run begins, and how they talk.

`llmsuite.checkpoint.own_disks` has how their checkpoints are written, `llmsuite.train.fetching` how they are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from llmsuite.checkpoint.own_disks import OwnDisk
from llmsuite.errors import UserError
from llmsuite.files import write_text_atomic
from llmsuite.launch.leaders import accept, connect, listen
from llmsuite.locks import lock_directory
from llmsuite.parallel import collective
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.regular import exists
from llmsuite.schema.section import as_plain
from llmsuite.train.output import recipe_text

_SEEN_SECONDS = 2.0
"""How long a file that another machine has written may take to appear here."""
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
    group = collective.mesh().group_of([of_machine[0] for of_machine in ranks])
    return OwnDisk(machine, ranks, _meet(machine, ranks), group)


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
    while is_first and not all(found := [exists(path) for path in paths]) and time.monotonic() < deadline:
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
    if disk.machine == 0 or not leads(disk):
        return contextlib.nullcontext()
    lock = lock_directory(plan.output_dir)
    if not resume:
        plan.check_output()
    write_text_atomic(plan.output_dir / "recipe.json", recipe_text(as_plain(plan.recipe)))
    return lock


# talking


def leads(disk: OwnDisk) -> bool:
    """Whether this rank is the first of its machine."""
    return is_lead_of(disk.machine, disk)


def is_lead_of(machine: int, disk: OwnDisk) -> bool:
    """Whether this rank is the first of a machine."""
    return collective.rank() == disk.ranks[machine][0]


def from_machines(disk: OwnDisk, own: Any) -> list[Any]:
    """The JSON data of the leading rank of each machine, on every rank."""
    text = json.dumps(own).encode()
    return [
        json.loads(bytes_of_machine(machine, text if is_lead_of(machine, disk) else None, disk))
        for machine in range(len(disk.ranks))
    ]


def bytes_of_machine(machine: int, data: bytes | None, disk: OwnDisk) -> bytes:
    """What the leading rank of a machine has, on every rank; `data` is None on the others."""
    source = disk.ranks[machine][0]
    sizes = collective.from_all_ranks([float(len(data)) if data is not None else 0.0])
    return collective.bytes_of_rank(source, int(sizes[source][0]), data)
