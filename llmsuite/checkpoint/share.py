"""Several processes write one checkpoint: who writes which tensor, and how the first learns that all are done.

Each writes files of its own into `step-N.tmp` and leaves a note of them there, `rank-0000R.json`, or of its error. The
first process waits for the notes and makes the directory complete. This needs no group of processes, so it is done
while training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmsuite.checkpoint.write import ManifestEntry
from llmsuite.errors import UserError
from llmsuite.files import os_errors, read_json_file, temporary_of, write_text_atomic

PATIENCE_SECONDS = 600.0
"""How long the first process waits when nothing grows any more."""
_POLL_SECONDS = 0.02


def assign(sizes: Mapping[str, int], ranks: Sequence[int], together: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Who writes which tensor: neighbours the same, all about as many bytes.

    Args:
        sizes: bytes of each tensor, in their order.
        ranks: those that may write them.
        together: marks of a tensor; two with a common one are written by the same rank.
    """
    total, before, writers = max(1, sum(sizes.values())), 0, {}
    writer_of: dict[str, int] = {}
    for name, size in sizes.items():
        marks = together.get(name, ())
        rank = next((writer_of[mark] for mark in marks if mark in writer_of), ranks[before * len(ranks) // total])
        writer_of.update(dict.fromkeys(marks, rank))
        writers[name] = rank
        before = min(before + size, total - 1)
    return writers


def write_part(final: Path, rank: int, write: Callable[[Path], ManifestEntry]) -> None:
    """Write this process's part of a directory that `begin_directory` has made, and leave a note of it.

    Raises:
        UserError: it cannot be written; the first process is told, if there is a way.
    """
    directory = temporary_of(final)
    try:
        with os_errors(final, "nothing of it is used"):
            written = write(directory)
        write_text_atomic(_note(directory, rank), json.dumps(dataclasses.asdict(written)))
    except UserError as error:
        if not directory.is_dir():  # the first process has given it up, and says why
            return
        with contextlib.suppress(UserError):  # on a full disk: then this process ends by its error, and the run with it
            write_text_atomic(_note(directory, rank), json.dumps({"error": str(error)}))
        raise


def collect_notes(directory: Path, num_ranks: int) -> ManifestEntry:
    """Wait until all other processes have written what is theirs, and take their notes away.

    Raises:
        UserError: one of them has failed, or nothing has grown for `PATIENCE_SECONDS`.
    """
    written, missing = ManifestEntry(), list(range(1, num_ranks))
    size, since = -1, time.monotonic()
    while missing:
        rank = missing[0]
        if _note(directory, rank).is_file():
            note = read_json_file(_note(directory, rank))
            if "error" in note:
                raise UserError(f"rank {rank}: {note['error']}")
            written.add(ManifestEntry(**note))
            _note(directory, rank).unlink()
            missing.pop(0)
            continue
        now = sum(path.stat().st_size for path in directory.iterdir() if path.suffix != ".tmp")
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE_SECONDS:
            raise UserError(
                f"{directory}: ranks {', '.join(map(str, missing))} have not written their part, and nothing there has "
                f"grown for {PATIENCE_SECONDS:,.0f} s; nothing was changed. Is output_dir on a file system that all "
                "machines see?"
            )
        time.sleep(_POLL_SECONDS)
    return written


def _note(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"
