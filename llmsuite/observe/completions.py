"""`completions.jsonl`: what the model has written in each rollout of a run, one object a completion."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.files import NO_ROOM, os_errors
from llmsuite.regular import is_file

COMPLETIONS = "completions.jsonl"
SCHEMA = 1
_TAIL_BYTES = 1 << 20


class CompletionsFile:
    """Appends rows. On resume it drops those of steps after the checkpoint, which will be drawn again, and what a kill
    has left of a last line. Rows are in the order of their steps."""

    def __init__(self, path: Path, resume_step: int):
        self._path = path
        with os_errors(path, NO_ROOM):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115  (open for the whole run)
            self._file.truncate(_end_of(self._file, resume_step))

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the completions of the rollout that this step, or this step first, learns from. Raises UserError when
        they cannot be written."""
        lines = (
            json.dumps({"schema": SCHEMA, "step": step, **row}, allow_nan=False, ensure_ascii=False) for row in rows
        )
        text = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
        with os_errors(self._path, NO_ROOM):
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is still there to be written
            self._file.close()


def _end_of(file: Any, last_step: int) -> int:
    """Where the rows up to a step end."""
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
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def sampled_completions(run: Path, rollouts: int, most: int) -> list[list[dict[str, Any]]]:
    """Completions of some rollouts over the whole run, the last one too, each `most` of them at most.

    Of a long file only the places are read that are shown.
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
    last = [row for line in lines if line.endswith(b"\n") and (row := _row(line)) is not None]
    if last:
        step = last[-1]["step"]
        found[step] = list(itertools.islice((row for row in last if row["step"] == step), most))
    return [found[step] for step in sorted(found)]


def _rollout_at(file: Any, start: int, most: int) -> list[dict[str, Any]]:
    """The first completions of the first rollout that begins behind a place."""
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
