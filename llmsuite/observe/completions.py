"""`completions.jsonl`: what the model has written in each rollout of a run, one object a completion."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmsuite.files import NO_ROOM, os_errors

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


def last_completions(run: Path, most: int) -> list[dict[str, Any]]:
    """The completions of a run's last rollout, `most` of them at most; of a very long rollout its end."""
    path = run / COMPLETIONS
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
    rows = [row for line in lines if line.endswith(b"\n") and (row := _row(line)) is not None]
    if not rows:
        return []
    return list(itertools.islice((row for row in rows if row["step"] == rows[-1]["step"]), most))
