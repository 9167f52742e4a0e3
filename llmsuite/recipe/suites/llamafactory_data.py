"""Data sets of LLaMA-Factory: dataset_info.json says where each is, and which columns it has."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.data.formats import MEDIA
from llmsuite.data.turns import SHAREGPT_ROLES
from llmsuite.errors import UserError
from llmsuite.recipe.conversion.kinds import MAPPING, ONE, Kind, check
from llmsuite.recipe.suites.suite import Run

_DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
"""As they are where an entry has no `columns`; those that it has replace all of them."""
_DEFAULT_TAGS = {
    "role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
_SPEAKERS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
"""Tags for who speaks, and the role that each is here."""
_PAIRS = ("dpo", "rm")
_REMOTE = "REMOTE:"
"""In front of a data set of Hugging Face whose dataset_info.json is read."""
_DATA_SET = Kind(one=False, keys={"columns": MAPPING, "tags": MAPPING}, others=ONE)
Columns = dict[str, str]


@dataclasses.dataclass(frozen=True)
class _DataSet:
    name: str
    place: str
    """As a value of `data.train`."""
    columns: Columns | None
    """As a value of `data.columns`; None where there is no dataset_info.json to tell."""


def rows(run: Run) -> dict[str, Any]:
    """The keys of section `data` that name files, their columns and how many rows are read."""
    train, held_out = _data_sets(run, "dataset"), _data_sets(run, "eval_dataset")
    if not train:
        raise UserError(f"{run.name}: has no dataset")
    most = run.take("max_samples")
    run.take("dataset_dir")
    columns = train[0].columns
    is_one_reading = run.section != "pretrain" and all(entry.columns == columns for entry in train)
    if not is_one_reading and (len(train) > 1 or most is not None):
        made = {"train": _file_to_make(run, "data.train", train, most)}
        return made | ({"eval": _file_to_make(run, "data.eval", held_out, most)} if held_out else {})
    found: dict[str, Any] = {"train": train[0].place}
    if len(train) > 1:
        found["mix"] = {entry.place: None for entry in train[1:]}
    if columns and columns != {"text": "text"}:
        found["columns"] = columns
    if most is not None:
        found["max_samples"] = most
    if any(entry.columns != columns for entry in held_out):
        run.refuse("eval_dataset", ",".join(entry.name for entry in held_out), "has columns of its own; data.columns "
                   "is for training and evaluation alike")  # fmt: skip
    if held_out:
        alone = len(held_out) == 1
        found["eval"] = held_out[0].place if alone else _file_to_make(run, "data.eval", held_out, most)
    return found


def _file_to_make(run: Run, key: str, entries: list[_DataSet], most: int | None) -> str:
    """A file with the rows of several data sets, or of a part of one, that the user has to write."""
    names = "+".join(entry.name for entry in entries)
    path = f"{_directory(run).removeprefix(_REMOTE)}/{names}{'' if most is None else f'-{most}'}.jsonl"
    part = "" if most is None else f", the first {most} of each"
    places = ", ".join(entry.place for entry in entries)
    run.note(f"{key}: is a file to make: {path}, with the rows of {places}{part}")
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
        run.note(f"data.train: {index} is not here, which says where {name} is and which columns it has; taken for "
                 f"{place} in one of the formats of `llmsuite list formats`")  # fmt: skip
        return _DataSet(name, place, None)
    try:
        entry = json.loads(index.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{index}: cannot be read as JSON: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{run.name}: {index} has no data set {name}")
    check(entry, _DATA_SET, f"{index}: {name}")
    for word, why in (("num_samples", "draws rows at random"), ("folder", "is a directory within a data set")):
        if entry.get(word) is not None:
            run.refuse(key, name, f"its {word} {why}; write the rows into a file")
    return _DataSet(name, _place(run, name, entry, index), _columns(run, key, name, entry))


def _place(run: Run, name: str, entry: Mapping[str, Any], index: Path) -> str:
    options = [f"split={entry.get('split') or 'train'}"]
    options += [f"config={entry['subset']}"] if entry.get("subset") else []
    most = run.given("max_samples")
    options += [f"rows={most}"] if most is not None and run.section != "pretrain" else []
    for word, hub in (("hf_hub_url", "hf"), ("ms_hub_url", "ms")):
        if word in entry:
            return f"{hub}:{entry[word]}?{'&'.join(options)}"
    if "file_name" in entry:
        return str(Path(_directory(run)) / str(entry["file_name"]))  # an absolute one stays as it is
    raise UserError(f"{run.name}: data set {name} of {index} is neither a file nor on Hugging Face or ModelScope")


def _columns(run: Run, key: str, name: str, entry: Mapping[str, Any]) -> Columns:
    """What each field of our formats is made of: exactly what is read there, so columns beyond it say nothing."""
    named = entry.get("columns") or _DEFAULT_COLUMNS
    theirs = {word: column for word, column in named.items() if column is not None}
    if odd := [word for word in MEDIA if word in theirs]:
        run.refuse(key, name, f"has {', '.join(odd)}; models read text")
    if "tools" in theirs:
        run.refuse(key, name, "has tools, which LLaMA-Factory writes in texts of its own, and not as the chat template")
    if run.section == "pretrain":
        if "prompt" not in theirs or "query" in theirs:
            run.refuse(key, name, "has no single column of text; write the text into one: pretrain.key")
        return {"text": theirs.get("prompt", "text")}
    if (run.section in _PAIRS) != bool(entry.get("ranking")):
        run.refuse(key, name, "is not for this stage there: its `ranking` says whether rows are pairs")
    if (run.section == "kto") != ("kto_tag" in theirs):
        run.refuse(key, name, "is not for this stage there: its column `kto_tag` says which answers are wanted")
    is_table = entry.get("formatting", "alpaca") == "alpaca"
    found = _of_texts(run, key, name, theirs) if is_table else _of_turns(run, key, name, theirs, entry.get("tags"))
    return {field: column for field, column in found.items() if column is not None}


def _of_texts(run: Run, key: str, name: str, theirs: Mapping[str, str]) -> dict[str, str | None]:
    """Columns of `formatting` alpaca."""
    pairs = run.section in _PAIRS
    answers = {"chosen": "chosen", "rejected": "rejected"} if pairs else {"response": "output"}
    beside = {"query": "input", "history": "history", "system": "system", "kto_tag": "kto_tag"}
    if any(word not in theirs for word in ("prompt", *answers)):
        run.refuse(key, name, "names no column for the question or none for the answer")
    question = "prompt" if pairs and not any(word in theirs for word in beside) else "instruction"
    return {ours: theirs.get(word) for word, ours in {"prompt": question, **beside, **answers}.items()}


def _of_turns(
    run: Run, key: str, name: str, theirs: Mapping[str, str], tags: Mapping[str, str | None] | None
) -> dict[str, str | None]:
    """Columns of `formatting` sharegpt and openai."""
    tags = _DEFAULT_TAGS if tags is None else tags
    keys = (tags.get("role_tag"), tags.get("content_tag"))
    roles = {word: tag for word in _SPEAKERS if (tag := tags.get(word)) is not None}
    if keys == ("role", "content"):
        known, field = all(_SPEAKERS[word] == tag for word, tag in roles.items()), "messages"
    else:
        known, field = all(SHAREGPT_ROLES.get(tag) == _SPEAKERS[word] for word, tag in roles.items()), "conversations"
        known = known and keys == ("from", "value") and tags.get("function_tag") in (None, "function_call")
    if not known:
        run.refuse(key, name, "has tags that no format knows; write the turns as from/value or role/content")
    if tags.get("system_tag") is None:
        run.note(f"{name}: rows with a turn of the system are trained; there they are left out, for want of system_tag")
    found: dict[str, str | None] = {field: theirs.get("messages"), "system": theirs.get("system")}
    if found[field] is None:
        run.refuse(key, name, "names no column for the turns")
    if field == "messages" and found["system"] is not None:
        run.refuse(key, name, "has a column for the system beside turns of role/content; write it as the first turn")
    if run.section in _PAIRS:
        if field == "messages":
            run.refuse(key, name, "has pairs of role/content that are no lists; write them as lists of one turn")
        found |= {word: theirs.get(word) for word in ("chosen", "rejected")}
    return found | ({"kto_tag": theirs["kto_tag"]} if "kto_tag" in theirs else {})
