"""The `checkpoints` directory of a run: lists, finds, names and deletes checkpoints.

`checkpoints/latest` names the newest checkpoint, `checkpoints/best` the one with the best value of the metric that the
recipe watches. `save.py` writes them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    REPLACED,
    broken_file,
    os_errors,
    read_json_file,
    remote_files,
    remove_directory,
    write_text_atomic,
)
from llmsuite.base.locks import remove_path
from llmsuite.base.safe_files import exists, is_dir, is_file, listed
from llmsuite.checkpoint.adapter_base import config_names
from llmsuite.checkpoint.side_adapters import is_side_adapter

_STEP = re.compile(r"step-(\d+)")


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints by step, oldest first, complete or not."""
    found = []
    for path in listed(root, "step-*"):
        match = _STEP.fullmatch(path.name)
        if match is not None and is_dir(path):
            found.append((int(match[1]), path))
    return sorted(found)


def find_latest(root: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint; each newer one that is damaged is reported and skipped."""
    for _, path in reversed(list_steps(root)):
        fault = broken_file(path)
        if fault is None:
            return path
        report(f"checkpoint {path} is damaged and passed over: {fault}")
    return None


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the best value of a metric so far; it is kept in addition to the last ones."""

    step: int
    metric: str
    value: float


def save_best(root: Path, best: Best) -> None:
    """Name the best checkpoint, which is on disk. Raises UserError when the file cannot be written."""
    write_text_atomic(root / "best", json.dumps(dataclasses.asdict(best)) + "\n")


def load_best(root: Path) -> Best | None:
    """Return the best checkpoint by `save_best`; None if there is none, or it has been deleted."""
    if not is_file(root / "best"):
        return None
    try:
        best = Best(**read_json_file(root / "best"))
    except TypeError as error:
        raise UserError(f"{root / 'best'}: does not have step, metric and value: {error}") from error
    if is_dir(root / f"step-{best.step}"):
        return best
    return None


def is_run(path: Path) -> bool:
    """Return True for the directory of a run that has saved a checkpoint."""
    return is_file(path / "checkpoints" / "latest")


def find_model(path: Path) -> Path:
    """Return a model directory; for the directory of a run, its newest checkpoint that has all its files.

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
            f"{path}: none of its checkpoints is complete{''.join(faults[:1])}; see: llmsuite checkpoints list {path}"
        )
    if remote_files(path):
        raise UserError(str(broken_file(path, check_hashes=False)))
    if not is_file(path / "config.json"):
        raise UserError(f"{path}: is neither a model directory (no config.json) nor a run (no checkpoints/latest)")
    return path


def find_adapter(path: Path) -> Path | None:
    """Return the directory of LoRA adapters, interventions or prefixes at a path; None for a model.

    For a run it is the newest complete checkpoint.
    """
    found = find_model(path) if is_run(path) else path
    if any(is_file(found / name) for name in config_names()) or is_side_adapter(found):
        return found
    return None


def adapter_hint(path: Path) -> str:
    """Return advice about a path of adapters that is given as a model."""
    return f"{path} has adapters, not a model; merge them into their model with `llmsuite merge {path} -o DIR`"


def gguf_hint(path: Path) -> str | None:
    """Return advice about a path that is a GGUF file, or a directory of such; None for others."""
    file = next(iter(listed(path, "*.gguf")), path)
    if file.suffix != ".gguf" or not is_file(file):
        return None
    return f"{file} is a GGUF file; make a model directory of it with `llmsuite import {file} -o DIR`"


def prune(root: Path, keep: int, report: Callable[[str], None]) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints, the best one and the one that `latest` names.

    Hashes decide if a checkpoint is complete; damaged ones are deleted and do not count.

    Returns:
        The checkpoints that were deleted.

    Raises:
        UserError: this machine has only parts of them.
    """
    if any(remote_files(path) for _, path in list_steps(root)):
        raise UserError(
            f"{root}: parts of its checkpoints are on other machines, which would keep incomplete checkpoints if parts "
            "are deleted here; checkpoint.keep_last deletes on all machines"
        )
    best = load_best(root)
    named = {f"step-{best.step}"} if best else set()
    latest = read_latest(root)
    if latest is not None:
        named.add(latest)
    kept = 0
    removed = []
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
    """Delete the partial files of a killed run, and restore the checkpoints that it was about to replace.

    Raises:
        UserError: the directory cannot be written to.
    """
    with os_errors(root):
        # a checkpoint is renamed before it is replaced: a killed run may have left only the renamed one
        for path in listed(root, f"step-*{REPLACED}"):
            final = path.with_name(path.name.removesuffix(REPLACED))
            if exists(final) or path.is_symlink():
                remove_path(path)
            else:
                path.rename(final)
        unfinished = [*listed(root, "step-*.tmp"), *listed(root, "step-*.fetched")]
        for path in (*unfinished, root / "latest.tmp", root / "best.tmp"):
            remove_path(path)


def name_latest(root: Path, path: Path) -> None:
    """Let `latest` name a checkpoint, unless it does: a run may end between the two writes.

    Raises:
        UserError: the file cannot be written.
    """
    if read_latest(root) != path.name:
        write_text_atomic(root / "latest", path.name + "\n")


def read_latest(root: Path) -> str | None:
    """Return the name in `latest`; None if there is no such file."""
    latest = root / "latest"
    if is_file(latest):
        return latest.read_text(encoding="utf-8", errors="replace").strip()
    return None
