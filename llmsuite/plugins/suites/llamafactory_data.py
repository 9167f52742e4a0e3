"""Data sets of LLaMA-Factory: dataset_info.json defines their sources and columns."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.data.keys import MEDIA
from llmsuite.data.turns import SHAREGPT_ROLES
from llmsuite.plugins.suites.conversion.kinds import MAPPING, ONE, Kind, check
from llmsuite.plugins.suites.suite import Run

_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""Columns of an entry without `columns`; an entry's own `columns` replace all of them."""
_DEFAULT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_SPEAKERS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
"""Tags of speakers -> role."""
_PAIRS = ("dpo", "rm")
_REMOTE = "REMOTE:"
"""Prefix of a Hugging Face data set whose dataset_info.json is read."""
_DATA_SET = Kind(one=False, keys={"columns": MAPPING, "tags": MAPPING}, others=ONE)
Columns = dict[str, str]


@dataclasses.dataclass(frozen=True)
class _DataSet:
    name: str
    source: str
    """Source as a value of `data.train`."""
    columns: Columns | None
    """Columns as a value of `data.columns`; None without a dataset_info.json."""


def rows(run: Run) -> dict[str, Any]:
    """Return the keys of section `data` that name files, their columns and the number of rows."""
    train = _data_sets(run, "dataset")
    held_out = _data_sets(run, "eval_dataset")
    if not train:
        raise UserError(f"{run.name}: has no dataset")
    max_rows = run.take("max_samples")
    run.take("dataset_dir")
    columns = train[0].columns
    has_same_columns = run.section != "pretrain" and all(entry.columns == columns for entry in train)
    if not has_same_columns and (len(train) > 1 or max_rows is not None):
        files = {"train": _file_to_make(run, "data.train", train, max_rows)}
        if held_out:
            files["eval"] = _file_to_make(run, "data.eval", held_out, max_rows)
        return files
    found: dict[str, Any] = {"train": train[0].source}
    if len(train) > 1:
        found["mix"] = {entry.source: None for entry in train[1:]}
    if columns and columns != {"text": "text"}:
        found["columns"] = columns
    if max_rows is not None:
        found["max_samples"] = max_rows
    if any(entry.columns != columns for entry in held_out):
        run.refuse("eval_dataset", ",".join(entry.name for entry in held_out), "has other columns; data.columns is the "
                   "same for training and evaluation")  # fmt: skip
    if held_out:
        found["eval"] = held_out[0].source
        if len(held_out) > 1:
            found["eval"] = _file_to_make(run, "data.eval", held_out, max_rows)
    return found


def _file_to_make(run: Run, key: str, entries: list[_DataSet], max_rows: int | None) -> str:
    """Return the name of a file that the user has to create from the rows of these data sets."""
    names = "+".join(entry.name for entry in entries)
    suffix = "" if max_rows is None else f"-{max_rows}"
    path = f"{_directory(run).removeprefix(_REMOTE)}/{names}{suffix}.jsonl"
    part = ""
    if max_rows is not None:
        part = f", the first {max_rows} of each"
    sources = ", ".join(entry.source for entry in entries)
    run.note(f"{key}: is a file to create: {path}, with the rows of {sources}{part}")
    return path


def _directory(run: Run) -> str:
    return str(run.given("dataset_dir") or "data")


def _data_sets(run: Run, key: str) -> list[_DataSet]:
    return [_data_set(run, key, name) for name in run.words(key)]


def _data_set(run: Run, key: str, name: str) -> _DataSet:
    directory = _directory(run)
    if directory == "ONLINE":
        return _DataSet(name, f"hf:{name}?split=train", _columns(run, key, name, {}))
    index = Path(directory) / "dataset_info.json"
    if not os.path.isfile(index):
        place = f"{directory.replace(_REMOTE, 'hf:')}/{name}.json"
        run.note(f"data.train: {index}, which defines the source and columns of {name}, is missing; assumed to be "
                 f"{place} in one of the formats of `llmsuite list formats`")  # fmt: skip
        return _DataSet(name, place, None)
    try:
        entry = json.loads(index.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{run.name}: {index} has no data set {name}")
    check(entry, _DATA_SET, f"{index}: {name}")
    for word, why in (("num_samples", "selects rows at random"), ("folder", "is a directory within a data set")):
        if entry.get(word) is not None:
            run.refuse(key, name, f"its {word} {why}; write the rows into a file")
    return _DataSet(name, _place(run, name, entry, index), _columns(run, key, name, entry))


def _place(run: Run, name: str, entry: Mapping[str, Any], index: Path) -> str:
    options = [f"split={entry.get('split') or 'train'}"]
    if entry.get("subset"):
        options.append(f"config={entry['subset']}")
    max_rows = run.given("max_samples")
    if max_rows is not None and run.section != "pretrain":
        options.append(f"rows={max_rows}")
    for word, hub in (("hf_hub_url", "hf"), ("ms_hub_url", "ms")):
        if word in entry:
            return f"{hub}:{entry[word]}?{'&'.join(options)}"
    if "file_name" in entry:
        return str(Path(_directory(run)) / str(entry["file_name"]))  # an absolute one stays as it is
    raise UserError(f"{run.name}: data set {name} of {index} is neither a file nor on Hugging Face or ModelScope")


def _columns(run: Run, key: str, name: str, entry: Mapping[str, Any]) -> Columns:
    """Return `data.columns` with exactly the columns that LLaMA-Factory reads."""
    named = entry.get("columns") or _DEFAULT_COLUMNS
    theirs = {word: column for word, column in named.items() if column is not None}
    media = [word for word in MEDIA if word in theirs]
    if media:
        run.refuse(key, name, f"has {', '.join(media)}; models read text")
    if "tools" in theirs:
        run.refuse(key, name, "has tools, which LLaMA-Factory writes in its own format, not by the chat template")
    if run.section == "pretrain":
        if "prompt" not in theirs or "query" in theirs:
            run.refuse(key, name, "has no single text column; write the text into one: pretrain.key")
        return {"text": theirs.get("prompt", "text")}
    if (run.section in _PAIRS) != bool(entry.get("ranking")):
        run.refuse(key, name, "is for another stage: `ranking` is true for preference pairs only")
    if (run.section == "kto") != ("kto_tag" in theirs):
        run.refuse(key, name, "is for another stage: only KTO data has a column `kto_tag`")
    if entry.get("formatting") == "openai":
        why = 'LLaMA-Factory adds "detailed thinking off" to the system turns of `formatting` openai; write it sharegpt'
        run.refuse(key, name, why)
    is_table = entry.get("formatting", "alpaca") == "alpaca"
    if is_table:
        found = _text_columns(run, key, name, theirs)
    else:
        found = _turn_columns(run, key, name, theirs, entry.get("tags"))
    return {field: column for field, column in found.items() if column is not None}


def _text_columns(run: Run, key: str, name: str, theirs: Mapping[str, str]) -> dict[str, str | None]:
    """Return `data.columns` for `formatting` alpaca."""
    pairs = run.section in _PAIRS
    answers = {"chosen": "chosen", "rejected": "rejected"} if pairs else {"response": "output"}
    optional = {"query": "input", "history": "history", "system": "system", "kto_tag": "kto_tag"}
    if any(word not in theirs for word in ("prompt", *answers)):
        run.refuse(key, name, "names no column for the question or the answer")
    question = "instruction"
    if pairs and not any(word in theirs for word in optional):
        question = "prompt"
    return {ours: theirs.get(word) for word, ours in {"prompt": question, **optional, **answers}.items()}


def _turn_columns(
    run: Run, key: str, name: str, theirs: Mapping[str, str], tags: Mapping[str, str | None] | None
) -> dict[str, str | None]:
    """Return `data.columns` for `formatting` sharegpt and openai."""
    tags = _DEFAULT_TAGS if tags is None else tags
    keys = (tags.get("role_tag"), tags.get("content_tag"))
    roles = {word: str(tags[word]) for word in _SPEAKERS if tags.get(word) is not None}
    if keys == ("role", "content"):
        known = all(_SPEAKERS[word] == tag for word, tag in roles.items())
        field = "messages"
    else:
        known = all(SHAREGPT_ROLES.get(tag) == _SPEAKERS[word] for word, tag in roles.items())
        field = "conversations"
        known = known and keys == ("from", "value") and tags.get("function_tag") in (None, "function_call")
    if not known:
        run.refuse(key, name, "has tags that no data format supports; write the turns as from/value or role/content")
    if tags.get("system_tag") is None:
        run.note(f"{name}: rows with a system turn are used; LLaMA-Factory drops them, as system_tag is missing")
    found: dict[str, str | None] = {field: theirs.get("messages"), "system": theirs.get("system")}
    if found[field] is None:
        run.refuse(key, name, "names no column for the turns")
    if field == "messages" and found["system"] is not None:
        run.refuse(key, name, "has a system column in addition to turns of role/content; write it as the first turn")
    if run.section in _PAIRS:
        if field == "messages":
            run.refuse(key, name, "has pairs of role/content that are not lists; write them as lists of one turn")
        found |= {word: theirs.get(word) for word in ("chosen", "rejected")}
    return found | ({"kto_tag": theirs["kto_tag"]} if "kto_tag" in theirs else {})
