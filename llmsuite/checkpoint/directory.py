"""The `checkpoints` directory of a run: which checkpoints are there, whole, newest or best, and which are to go.

`checkpoints/latest` names the newest checkpoint, `checkpoints/best` the one with the best value of the metric that the
recipe watches. `save.py` writes them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

from llmsuite.checkpoint.adapter_base import CONFIGS
from llmsuite.checkpoint.beside import is_beside
from llmsuite.errors import UserError
from llmsuite.files import (
    broken_file,
    lying_elsewhere,
    os_errors,
    read_json_file,
    remove_directory,
    write_text_atomic,
)
from llmsuite.locks import remove_any
from llmsuite.regular import exists, is_dir, is_file, listed

_STEP = re.compile(r"step-(\d+)")


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step, oldest first, whole or not."""
    found = [(int(m[1]), p) for p in listed(root, "step-*") if is_dir(p) and (m := _STEP.fullmatch(p.name))]
    return sorted(found)


def find_latest(root: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; each newer one that is damaged is reported and passed over."""
    for _, path in reversed(list_steps(root)):
        fault = broken_file(path)
        if fault is None:
            return path
        report(f"checkpoint {path} is damaged and passed over: {fault}")
    return None


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the best value of a metric so far; it is kept besides the last ones."""

    step: int
    metric: str
    value: float


def save_best(root: Path, best: Best) -> None:
    """Name the best checkpoint, which is on disk. Raises UserError when the file cannot be written."""
    write_text_atomic(root / "best", json.dumps(dataclasses.asdict(best)) + "\n")


def load_best(root: Path) -> Best | None:
    """The best checkpoint by `save_best`; None when there is none, or it has been deleted."""
    if not is_file(root / "best"):
        return None
    try:
        best = Best(**read_json_file(root / "best"))
    except TypeError as error:
        raise UserError(f"{root / 'best'}: has not step, metric and value: {error}") from error
    return best if is_dir(root / f"step-{best.step}") else None


def is_run(path: Path) -> bool:
    """Whether this is the directory of a run that has saved something."""
    return is_file(path / "checkpoints" / "latest")


def find_model(path: Path) -> Path:
    """A model directory; for the directory of a run, its newest checkpoint that has all its files.

    Raises:
        UserError: it is neither.
    """
    if is_run(path):
        faults = []
        for _, found in reversed(list_steps(path / "checkpoints")):
            fault = broken_file(found, check_hashes=False)
            if fault is None:
                return found
            faults.append(f": {fault}")
        raise UserError(
            f"{path}: none of its checkpoints is whole{''.join(faults[:1])}; see: llmsuite checkpoints list {path}"
        )
    if lying_elsewhere(path):
        raise UserError(str(broken_file(path, check_hashes=False)))
    if not is_file(path / "config.json"):
        raise UserError(f"{path}: is neither a model directory (no config.json) nor a run (no checkpoints/latest)")
    return path


def find_adapter(path: Path) -> Path | None:
    """The directory of LoRA adapters, interventions or prefixes at a path, for a run its newest whole checkpoint; None
    for a model."""
    found = find_model(path) if is_run(path) else path
    return found if any(is_file(found / name) for name in CONFIGS) or is_beside(found) else None


def of_adapters(path: Path) -> str:
    """What to do with a path of adapters where a model is wanted."""
    return f"{path} has adapters, not a model; merge them into their model with `llmsuite merge {path} -o DIR`"


def of_gguf(path: Path) -> str | None:
    """What to do with a path that is a GGUF file, or a directory of such; None for others."""
    file = next(iter(listed(path, "*.gguf")), path)
    if file.suffix != ".gguf" or not is_file(file):
        return None
    return f"{file} is a GGUF file; make a model directory of it with `llmsuite import {file} -o DIR`"


def prune(root: Path, keep: int, report: Callable[[str], None]) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, the best one and the one that `latest` names.

    Hashes decide whether a checkpoint is whole; damaged ones are deleted and do not count.

    Returns:
        The checkpoints that were deleted.

    Raises:
        UserError: this machine has only parts of them.
    """
    if any(lying_elsewhere(path) for _, path in list_steps(root)):
        raise UserError(
            f"{root}: parts of its checkpoints are on other machines, and what is deleted here would be torn there; "
            "checkpoint.keep_last deletes on all machines"
        )
    best = load_best(root)
    named = {f"step-{best.step}"} if best else set()
    if (latest := read_latest(root)) is not None:
        named.add(latest)
    kept, removed = 0, []
    for _, path in reversed(list_steps(root)):
        fault = broken_file(path) if kept < keep else None
        if fault is not None:
            report(f"{path} is damaged: {fault}")
        elif kept < keep or path.name in named:
            kept += 1
            continue
        remove_directory(path)
        removed.append(path)
    return removed


def remove_unfinished(root: Path) -> None:
    """Delete what a killed run has half written, and bring back the checkpoints it was about to replace.

    Raises:
        UserError: the place cannot be written to.
    """
    with os_errors(root):
        for path in listed(root, "step-*.old"):
            whole = path.with_name(path.name.removesuffix(".old"))
            if exists(whole) or path.is_symlink():
                remove_any(path)
            else:
                path.rename(whole)
        unfinished = [*listed(root, "step-*.tmp"), *listed(root, "step-*.fetched")]
        for path in (*unfinished, root / "latest.tmp", root / "best.tmp"):
            remove_any(path)


def name_latest(root: Path, path: Path) -> None:
    """Let `latest` name a checkpoint, unless it does: a run may end between writing the one and the other. Raises
    UserError."""
    if read_latest(root) != path.name:
        write_text_atomic(root / "latest", path.name + "\n")


def read_latest(root: Path) -> str | None:
    """The name that `latest` has; None where there is no such file."""
    latest = root / "latest"
    return latest.read_text(encoding="utf-8", errors="replace").strip() if is_file(latest) else None
