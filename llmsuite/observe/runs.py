"""Reads the directory of a run: its metrics, events and status."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.locks import is_locked
from llmsuite.base.safe_files import exists, is_file, listed
from llmsuite.observe.completions import sampled_completions
from llmsuite.observe.events import ENVIRONMENT, EVENTS, read_events
from llmsuite.observe.generations import sampled_generations

Record = dict[str, Any]
_SAMPLED_STEPS = 8
_MAX_SAMPLES = 16


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's directory."""

    directory: Path
    recipe: Record
    """The resolved recipe; empty if the run ended before it was written."""
    steps: list[Record]
    """Records of training steps, from `metrics.jsonl`."""
    evaluations: list[Record]
    """Records of evaluations, from `metrics.jsonl`."""
    ranks: list[Record]
    """Times of each rank, from `ranks.jsonl`."""
    events: list[Record]
    environment: Record
    samples: list[list[Record]] = dataclasses.field(default_factory=list)
    """Completions of some rollouts, the last one included, from `completions.jsonl`."""
    answers: list[tuple[int, list[Record]]] = dataclasses.field(default_factory=list)
    """Answers at some evaluations by their steps, the last one included, from `generations`."""
    last_record_time: float | None = None
    """Time of the last recorded step, in seconds since 1970."""
    is_dead: bool = False
    """True where no process of the run is left, as far as this machine knows."""

    @property
    def status(self) -> str:
        """The status by the last event: running, ended, stopped, failed, hung, or unknown without events; died for a
        run that could not record its end."""
        if not self.events:
            return "unknown"
        last = str(self.events[-1]["event"])
        if last in ("ended", "stopped", "failed", "hung"):
            return last
        return "died" if self.is_dead else "running"

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric."""
        records = [r for r in [*self.steps, *self.evaluations] if r.get(name) is not None]
        return [int(r["step"]) for r in records], [float(r[name]) for r in records]


def read_run(directory: Path) -> Run:
    """Read the present state of a run.

    Raises:
        UserError: it is not the directory of a run.
    """
    if not is_run(directory):
        message = "is not the directory of a run, with recipe.json and metrics.jsonl; see: llmsuite runs list"
        raise UserError(f"{directory}: {message}")
    # before the events are read: then a run that ends in between has recorded its end
    is_dead = is_locked(directory) is False
    environment = _object(directory / ENVIRONMENT)
    records = _records(directory / "metrics.jsonl")
    last_record_time = None
    if has_records(directory):
        last_record_time = (directory / "metrics.jsonl").stat().st_mtime
    return Run(
        directory,
        _object(directory / "recipe.json"),
        [r for r in records if not _is_evaluation(r)],
        [r for r in records if _is_evaluation(r)],
        _records(directory / "ranks.jsonl"),
        read_events(directory),
        environment,
        sampled_completions(directory, _SAMPLED_STEPS, _MAX_SAMPLES),
        sampled_generations(directory, _SAMPLED_STEPS, _MAX_SAMPLES),
        last_record_time,
        is_dead and environment.get("host") == platform.node(),
    )


def has_records(directory: Path) -> bool:
    """True where a run has started to write."""
    return is_file(directory / "metrics.jsonl") and is_file(directory / "recipe.json")


def is_run(directory: Path) -> bool:
    """True where a run has started to write, or its launcher has recorded that it ended before."""
    return has_records(directory) or (is_file(directory / EVENTS) and not exists(directory / "recipe.json"))


def find_runs(root: Path) -> list[Path]:
    """The directories of runs in or below a directory, sorted by name."""
    files = [*listed(root, "**/metrics.jsonl"), *listed(root, f"**/{EVENTS}")]
    return sorted({path.parent for path in files if is_run(path.parent)})


def flatten(recipe: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a recipe and their values."""
    for key, value in recipe.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def differing_keys(*recipes: Record) -> list[tuple[str, list[Any]]]:
    """The keys in which recipes differ, with the value of each recipe; None where it lacks the key."""
    tables = [dict(flatten(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for table in tables for key in table)
    differing = []
    for key in keys:
        values = [table.get(key) for table in tables]
        if any(value != values[0] for value in values):
            differing.append((key, values))
    return differing


def _is_evaluation(record: Record) -> bool:
    return any(name.startswith("eval/") for name in record)


def _records(path: Path) -> list[Record]:
    """The records of a JSON Lines file, without a last line that is still being written or was truncated by a kill."""
    found = []
    text = ""
    if is_file(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            found.append(record)
    return found


def _object(path: Path) -> Record:
    if not is_file(path):
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
