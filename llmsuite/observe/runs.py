"""Reads the directory of a run: its records, events, and how it stands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.observe.events import ENVIRONMENT, read_events

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What lies in the directory of a run."""

    directory: Path
    recipe: Record
    """Resolved; empty when the run did not come so far."""
    steps: list[Record]
    """Of `metrics.jsonl`: records of training steps."""
    evaluations: list[Record]
    """The same: those of evaluations."""
    ranks: list[Record]
    """Of `ranks.jsonl`: what each rank took."""
    events: list[Record]
    environment: Record

    @property
    def status(self) -> str:
        """What the last event says: running, ended, stopped, failed or hung."""
        names = {"ended": "ended", "stopped": "stopped", "failed": "failed", "hung": "hung"}
        told = [names[event["event"]] for event in self.events[-1:] if event["event"] in names]
        return told[0] if told else "running" if self.events else "unknown"

    @property
    def series_names(self) -> list[str]:
        """Metrics of training steps, in the order they first come."""
        return list(dict.fromkeys(name for record in self.steps for name in record))

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        records = [r for r in [*self.steps, *self.evaluations] if r.get(name) is not None]
        return [int(r["step"]) for r in records], [float(r[name]) for r in records]


def read_run(directory: Path) -> Run:
    """Read what is there now.

    Raises:
        UserError: it is no directory of a run.
    """
    if not is_run(directory):
        raise UserError(f"{directory}: is not the directory of a run: it has neither recipe.json nor metrics.jsonl")
    records = _records(directory / "metrics.jsonl")
    return Run(
        directory,
        _object(directory / "recipe.json"),
        [r for r in records if not _is_evaluation(r)],
        [r for r in records if _is_evaluation(r)],
        _records(directory / "ranks.jsonl"),
        read_events(directory),
        _object(directory / ENVIRONMENT),
    )


def is_run(directory: Path) -> bool:
    """Whether a run has begun to write there."""
    return (directory / "metrics.jsonl").is_file() and (directory / "recipe.json").is_file()


def find_runs(root: Path) -> list[Path]:
    """Directories of runs in or below a directory, in the order of their names."""
    return sorted(path.parent for path in root.rglob("metrics.jsonl") if is_run(path.parent))


def flat(recipe: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a recipe and their values."""
    for key, value in recipe.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differing(*recipes: Record) -> list[tuple[str, list[Any]]]:
    """Keys in which recipes differ, and the value each has; None where it has not got the key."""
    tables = [dict(flat(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key) for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _is_evaluation(record: Record) -> bool:
    return any(name.startswith("eval/") for name in record)


def _records(path: Path) -> list[Record]:
    """Lines of JSON; one that is being written, or that a kill has cut off, is left out."""
    found = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            found.append(record)
    return found


def _object(path: Path) -> Record:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
