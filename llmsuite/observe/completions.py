"""The file `completions.jsonl`: the completions of each rollout of a run, one JSON object per completion."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.files import NO_ROOM, os_errors
from llmsuite.base.safe_files import is_file

COMPLETIONS = "completions.jsonl"
SCHEMA = 1
_TAIL_BYTES = 1 << 20


class CompletionsFile:
    """Appends rows, in the order of their steps. On resume it drops those of steps after the checkpoint, which will be
    sampled again, and a last line that was truncated by a kill."""

    def __init__(self, path: Path, resume_step: int):
        self._path = path
        with os_errors(path, NO_ROOM):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115  (open for the whole run)
            self._file.truncate(_end_of(self._file, resume_step))

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the completions of the rollout that this step is the first to train on. Raises UserError when they
        cannot be written."""
        lines = (
            json.dumps({"schema": SCHEMA, "step": step, **row}, allow_nan=False, ensure_ascii=False) for row in rows
        )
        text = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
        with os_errors(self._path, NO_ROOM):
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries again to write buffered text that could not be written
            self._file.close()


def _end_of(file: Any, last_step: int) -> int:
    """The position in bytes after the rows up to a step."""
    file.seek(0)
    end = 0
    for line in file:
        row = _row(line) if line.endswith(b"\n") else None
        if row is None or row["step"] > last_step:
            break
        end += len(line)
    return end


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # truncated by a kill
        return None
    if isinstance(row, dict) and isinstance(row.get("step"), int):
        return row
    return None


def sampled_completions(run: Path, rollouts: int, most: int) -> list[list[dict[str, Any]]]:
    """Completions of some rollouts spread over the run, the last one included, at most `most` of each.

    Only parts of a long file are read.
    """
    path = run / COMPLETIONS
    if not is_file(path):
        return []
    found: dict[int, list[dict[str, Any]]] = {}
    with open(path, "rb") as file:
        size = path.stat().st_size
        for number in range(rollouts - 1):
            rows = _rollout_at(file, size * number // max(1, rollouts - 1), most)
            if rows:
                found.setdefault(rows[0]["step"], rows)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
    rows_at_end = [_row(line) for line in lines if line.endswith(b"\n")]
    last = [row for row in rows_at_end if row is not None]
    if last:
        step = last[-1]["step"]
        found[step] = list(itertools.islice((row for row in last if row["step"] == step), most))
    return [found[step] for step in sorted(found)]


def _rollout_at(file: Any, start: int, most: int) -> list[dict[str, Any]]:
    """The first completions of the first rollout that begins after a position in the file."""
    file.seek(start)
    before = None
    if start:
        file.readline()  # a part of a line
        before = _row(file.readline())
    rows: list[dict[str, Any]] = []
    while len(rows) < most and file.tell() < start + _TAIL_BYTES:
        line = file.readline()
        row = _row(line) if line.endswith(b"\n") else None
        if row is None or (rows and row["step"] != rows[0]["step"]):
            break
        if before is None or row["step"] != before["step"]:
            rows.append(row)
    return rows
