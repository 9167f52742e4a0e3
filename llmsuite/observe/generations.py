"""The files `generations/step-N.jsonl`: the model's answers at each evaluation of a run, one JSON object per prompt."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmsuite.base.files import NO_ROOM, os_errors, write_text_atomic
from llmsuite.base.safe_files import is_file, listed

GENERATIONS = "generations"


def write_generations(run: Path, step: int, rows: Iterable[Mapping[str, str]]) -> None:
    """Write the answers after a step; they replace those of an earlier attempt at it.

    Args:
        run: its directory.
        step: optimizer steps that are done.
        rows: each with "prompt", "output" and "tgt", the reference.

    Raises:
        UserError: they cannot be written.
    """
    path = run / GENERATIONS / f"step-{step}.jsonl"
    with os_errors(path, NO_ROOM):
        path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text_atomic(path, "".join(lines))


def drop_generations(run: Path, last_step: int) -> None:
    """Remove the answers of later steps, which will be repeated. Raises UserError when they cannot be removed."""
    for step, path in _files(run):
        if step > last_step:
            with os_errors(path, NO_ROOM):
                path.unlink(missing_ok=True)


def sampled_generations(run: Path, steps: int, most: int) -> list[tuple[int, list[dict[str, str]]]]:
    """Answers at some evaluations spread over the run, the last one included.

    Args:
        run: its directory.
        steps: evaluations at most.
        most: answers of each at most, the first ones.

    Returns:
        The step of each evaluation, and its answers.
    """
    files = _files(run)
    count = min(steps, len(files))
    picked = [files[(i + 1) * len(files) // count - 1] for i in range(count)]
    return [(step, _first_rows(path, most)) for step, path in picked]


def _files(run: Path) -> list[tuple[int, Path]]:
    """The files of a run by their steps, in order."""
    found = []
    for path in listed(run / GENERATIONS, "step-*.jsonl"):
        number = path.stem.removeprefix("step-")
        if number.isascii() and number.isdigit() and is_file(path):
            found.append((int(number), path))
    return sorted(found)


def _first_rows(path: Path, most: int) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            rows = [json.loads(line) for line in itertools.islice(file, most)]
    except (FileNotFoundError, ValueError):  # the run has just returned to an earlier step, or a disk was full
        return []
    return [row for row in rows if isinstance(row, dict)]
