"""Node-local storage: detection of machines that share no output_dir, and communication between them.

`llmsuite.checkpoint.local_storage` writes their checkpoints, `llmsuite.engine.fetching` reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import write_text_atomic
from llmsuite.base.locks import lock_directory
from llmsuite.base.progress import report
from llmsuite.base.safe_files import exists
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.engine.output import recipe_text
from llmsuite.launch.leaders import accept, connect, listen
from llmsuite.parallel import collective

_VISIBLE_SECONDS = 2.0
"""Time in seconds after which a file of another machine is visible on a shared file system."""
_KEY_WORDS = 4
"""Number of 32-bit words of the key that authenticates connections."""


def find_local_storage(output_dir: Path, num_machines: int) -> LocalStorage | None:
    """Return this machine, if every machine has its own output_dir; None if all share one. A collective call.

    Raises:
        UserError: some machines share it and some do not, or it cannot be written to.
    """
    if num_machines == 1:
        return None
    local = [int(local_rank) for (local_rank,) in collective.all_gather_floats([collective.local_rank()])]
    starts = [rank for rank, number in enumerate(local) if number == 0]
    ranks = [range(start, end) for start, end in zip(starts, [*starts[1:], len(local)])]
    machine = next(number for number, its_ranks in enumerate(ranks) if collective.rank() in its_ranks)
    visible = _visible_machines(output_dir, machine, starts)
    if all(all(row) for row in visible):
        return None
    if visible != np.eye(len(ranks), dtype=bool).tolist():  # not even each only its own
        sees = "; ".join(f"machine {i} sees that of {_listed(row)}" for i, row in enumerate(visible))
        raise UserError(
            f"output_dir: {output_dir} is shared by some of the machines ({sees}); it has to be one directory for all "
            "of them, or for each a directory of its own"
        )
    report("the machines share no output_dir: each keeps the part of a checkpoint that its ranks write")
    group = collective.mesh().group_of([its_ranks[0] for its_ranks in ranks])
    return LocalStorage(machine, ranks, _connect_leaders(machine, ranks), group)


def _visible_machines(output_dir: Path, machine: int, starts: Sequence[int]) -> list[list[bool]]:
    """Return for each machine whose files it sees in `output_dir`: [machines][machines]."""
    name = f".machine-{int(collective.broadcast_from_rank0([secrets.randbelow(1 << 52)])[0]):x}"
    paths = [output_dir / f"{name}-{number}" for number in range(len(starts))]
    is_first = collective.rank() == starts[machine]
    if is_first:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            paths[machine].touch()
        except OSError as error:
            raise UserError(f"machine {machine}: {output_dir}: cannot be written to: {error.strerror}") from error
    collective.barrier()  # every machine has created its file
    deadline = time.monotonic() + _VISIBLE_SECONDS
    found = [False] * len(paths)
    while is_first:
        found = [exists(path) for path in paths]
        if all(found) or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    by_rank = collective.all_gather_floats([float(is_there) for is_there in found])
    if is_first:
        paths[machine].unlink(missing_ok=True)
    by_machine = np.array([by_rank[start] for start in starts])
    visible: list[list[bool]] = (by_machine > 0).tolist()
    return visible


def _listed(row: Sequence[bool]) -> str:
    return ", ".join(str(number) for number, is_visible in enumerate(row) if is_visible) or "none"


def _connect_leaders(machine: int, ranks: Sequence[Sequence[int]]) -> Any:
    """Connect the leading ranks of the machines; returns the connections of this rank, None if it is no leader."""
    host = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0].rpartition(":")[0]
    # 32-bit words are exact as the float64 values of the broadcast
    words = [secrets.randbelow(1 << 32) for _ in range(_KEY_WORDS)]
    words = list(map(int, collective.broadcast_from_rank0(list(map(float, words)))))
    key = b"".join(word.to_bytes(4, "little") for word in words)
    listener = listen(host, key, len(ranks)) if collective.rank() == 0 else None
    port = int(collective.broadcast_from_rank0([listener.address[1] if listener else 0])[0])
    if listener is not None:
        return accept(listener, len(ranks) - 1)
    if collective.rank() == ranks[machine][0]:
        return connect(host, port, key, machine)
    return None


def claim_directory(
    output_dir: Path, recipe: Mapping[str, Any], disk: LocalStorage, check_new: Callable[[], None] | None
) -> AbstractContextManager[Any]:
    """Lock output_dir and write the recipe to it on a machine without rank 0; rank 0 does so on its machine.

    Args:
        output_dir: directory of the run.
        recipe: the resolved recipe as plain data.
        disk: this machine.
        check_new: raises UserError where the directory has checkpoints; None in a run that continues from them.

    Raises:
        UserError: another run is writing there, or this run is new and there are checkpoints.
    """
    if disk.machine == 0 or not leads(disk):
        return contextlib.nullcontext()
    lock = lock_directory(output_dir)
    if check_new is not None:
        check_new()
    write_text_atomic(output_dir / "recipe.json", recipe_text(recipe))
    return lock


# communication


def leads(disk: LocalStorage) -> bool:
    """Return True if this rank is the leading rank of its machine."""
    return leads_machine(disk.machine, disk)


def leads_machine(machine: int, disk: LocalStorage) -> bool:
    """Return True if this rank is the leading rank of a machine."""
    return collective.rank() == disk.ranks[machine][0]


def gather_from_machines(disk: LocalStorage, own: Any) -> list[Any]:
    """Gather the JSON data of the leading rank of each machine, on every rank. A collective call."""
    text = json.dumps(own).encode()
    by_machine = []
    for machine in range(len(disk.ranks)):
        sent = text if leads_machine(machine, disk) else None
        by_machine.append(json.loads(broadcast_from_machine(machine, sent, disk)))
    return by_machine


def broadcast_from_machine(machine: int, data: bytes | None, disk: LocalStorage) -> bytes:
    """Broadcast bytes of the leading rank of a machine to every rank; `data` is None on the others. A collective
    call."""
    source = disk.ranks[machine][0]
    # the receivers need the size first
    sizes = collective.all_gather_floats([float(len(data)) if data is not None else 0.0])
    return collective.broadcast_bytes(source, int(sizes[source][0]), data)
