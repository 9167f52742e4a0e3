"""Data sets of TRL: one by name, or a mixture of several with equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists, is_dir
from llmsuite.plugins.suites.conversion.kinds import LIST, ONE, Kind, is_on
from llmsuite.plugins.suites.suite import Run

_KNOWN = ("path", "name", "split", "data_files", "columns")
_PARTS = Kind(one=False, items=Kind(keys={
    **dict.fromkeys(_KNOWN, ONE), "data_files": Kind(items=ONE, keys={}), "columns": LIST,
}))  # fmt: skip
"""Kind of `datasets`."""


def rows(run: Run) -> dict[str, Any]:
    """Return the keys of section `data` that name files and their columns."""
    parts = run.take("datasets", _PARTS) or []
    train, test = (run.take(f"dataset_{kind}_split") or kind for kind in ("train", "test"))
    name = run.take("dataset_name")
    config = run.take("dataset_config")
    if parts:
        return _mixture(run, [part if isinstance(part, dict) else {"path": str(part)} for part in parts])
    if name is None:
        raise UserError(f"{run.name}: has no dataset_name and no datasets")
    if exists(str(name)):
        return {"train": _split(run, Path(str(name)), train), **_held_out(run, Path(str(name)), test)}
    more = f"&config={config}" if config else ""
    return {"train": f"hf:{name}?split={train}{more}", "eval": f"hf:{name}?split={test}{more}"}


def _split(run: Run, place: Path, split: str) -> str:
    """Return the file of a split in a directory, or the directory if no file has the name of the split."""
    found = sorted(file for file in place.iterdir() if split in file.name) if is_dir(place) else []
    if len(found) > 1:
        run.refuse("dataset_name", str(place), f"has {len(found)} files of split {split}; put them into a directory")
    return str(found[0] if found else place)


def _held_out(run: Run, place: Path, split: str) -> dict[str, str]:
    if not _evaluates(run):
        return {}
    held_out = _split(run, place, split)
    if held_out == str(place):
        run.refuse("dataset_test_split", split, f"{place} has no file of this name to evaluate on")
    return {"eval": held_out}


def _evaluates(run: Run) -> bool:
    return str(run.given("eval_strategy") or "no") != "no"


def _mixture(run: Run, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keys for the rows of all parts."""
    if _evaluates(run) and not is_on(run.given("test_split_size")):
        run.refuse("eval_strategy", run.given("eval_strategy"), "a mixture of datasets has no evaluation data")
    for part in parts:
        unsupported = sorted(set(part) - {*_KNOWN})
        if unsupported:
            run.refuse("datasets", ", ".join(unsupported), "data.train and data.mix read all rows of a split")
    sources = [source for part in parts for source in _sources(run, part)]
    if not sources:
        raise UserError(f"{run.name}: datasets names no files: data_files is empty")
    columns = [part.get("columns") for part in parts]
    if any(chosen != columns[0] for chosen in columns):
        run.refuse("datasets", "columns", "data.columns is the same for all files")
    found: dict[str, Any] = {"train": sources[0]}
    if len(sources) > 1:
        found["mix"] = dict.fromkeys(sources[1:])
    if len({*sources}) < len(sources):
        run.refuse("datasets", "the same twice", "data.mix has each file once")
    if columns[0]:
        found["columns"] = {str(column): str(column) for column in columns[0]}
    return found


def _sources(run: Run, part: dict[str, Any]) -> list[str]:
    files = part.get("data_files")
    if isinstance(files, dict):
        run.refuse("datasets", "data_files", "data.train and data.mix name files without splits")
        return [", ".join(map(str, files))]
    if files is not None:
        return [str(file) for file in (files if isinstance(files, list) else [files])]
    config = ""
    if part.get("name"):
        config = f"&config={part['name']}"
    return [f"hf:{part.get('path')}?split={part.get('split') or 'train'}{config}"]
