"""Data sets of LLaMA-Factory become files, columns and a number of rows, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.builtin import llmsuite_register_data_formats
from llmsuite.data.keys import ColumnRules
from llmsuite.data.read import read_rows
from tests.support.llamafactory import ACTION, DPO, SFT
from tests.unit.plugins.suites.conftest import Converted

ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
TURNS = {"formatting": "sharegpt"}
PAIRS = {"ranking": True}
PRETRAIN = {**SFT, "stage": "pt", "finetuning_type": "full", "lora_rank": None, "lora_target": None, "template": None}
INDEX: dict[str, Any] = {
    "plain": {"file_name": "rows.jsonl"},
    "more": {"file_name": "more.json"},
    "elsewhere": {"file_name": "/corpora/rows.json"},
    "hub": {"hf_hub_url": "org/rows", "subset": "en"},
    "scope": {"ms_hub_url": "org/rows", "split": "held"},
    "named": {"file_name": "named.csv", "columns": {"prompt": "question", "response": "answer", "system": "role"}},
    "turns": {**TURNS, "file_name": "turns.json", "columns": {"messages": "dialogue", "system": "head"}},
    "chat": {**TURNS, "file_name": "chat.json", "columns": {"messages": "m"}, "tags": ROLES},
    "pairs": {**TURNS, **PAIRS, "file_name": "p.json", "columns": {"messages": "c", "chosen": "a", "rejected": "b"}},
    "texts": {**PAIRS, "file_name": "p.json", "columns": {"prompt": "q", "chosen": "a", "rejected": "b"}},
    "three": {**PAIRS, "file_name": "p.json", "columns": {"prompt": "q", "query": "i", "chosen": "a", "rejected": "b"}},
    "wanted": {**TURNS, "file_name": "w.json", "columns": {"messages": "m", "kto_tag": "label"}, "tags": ROLES},
    "corpus": {"file_name": "c.jsonl", "columns": {"prompt": "text"}},
    "lines": {"file_name": "c.txt", "columns": {"prompt": "content"}},
    # and those that are refused
    "script": {"script_url": "x"},
    "sampled": {"file_name": "rows.jsonl", "num_samples": 5},
    "folder": {"hf_hub_url": "org/rows", "folder": "x"},
    "images": {"file_name": "i.json", "columns": {"prompt": "q", "response": "a", "images": "images"}},
    "tools": {**TURNS, "file_name": "t.json", "columns": {"messages": "conversations", "tools": "tools"}},
    "odd": {**TURNS, "file_name": "o.json", "tags": {**ROLES, "user_tag": "customer"}},
    "headed": {**TURNS, "file_name": "h.json", "columns": {"messages": "m", "system": "s"}, "tags": ROLES},
    "answer": {"file_name": "a.json", "columns": {"prompt": "q"}},
    "one": {**PAIRS, "file_name": "p.json", "columns": {"prompt": "q", "query": "i", "chosen": "a"}},
    "roles": {**PAIRS, **TURNS, "file_name": "p.json", "columns": {"messages": "m", "chosen": "a", "rejected": "b"},
              "tags": ROLES},
}  # fmt: skip
ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}


@pytest.fixture
def data(converted: Converted, tmp_path: Path) -> Any:
    """Section `data` for a data set, without what has nothing to do with it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INDEX))

    def make(name: str, base: dict[str, Any] = SFT, **values: Any) -> dict[str, Any]:
        found = converted(ACTION, {**base, "dataset": name, **values}).recipe["data"]
        return {key: found[key] for key in ("train", "mix", "columns", "max_samples", "eval") if key in found}

    return make


def test_columns_are_those_that_the_suite_reads(data: Any) -> None:
    """Exactly those that LLaMA-Factory reads: a column "history" or "system" that it has no word for says nothing."""
    assert data("plain") == {"train": "data/rows.jsonl", "columns": ALPACA}
    named = {"instruction": "question", "output": "answer", "system": "role"}
    assert data("named") == {"train": "data/named.csv", "columns": named}
    assert data("turns")["columns"] == {"conversations": "dialogue", "system": "head"}
    assert data("chat")["columns"] == {"messages": "m"}
    assert data("pairs", DPO)["columns"] == {"conversations": "c", "chosen": "a", "rejected": "b"}
    assert data("texts", DPO)["columns"] == {"prompt": "q", "chosen": "a", "rejected": "b"}
    three = {"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"}
    assert data("three", DPO)["columns"] == three
    assert data("wanted", {**SFT, "stage": "kto"})["columns"] == {"messages": "m", "kto_tag": "label"}
    assert "columns" not in data("corpus", PRETRAIN)  # it is "text", as here
    assert data("lines", PRETRAIN)["columns"] == {"text": "content"}


def test_places_and_numbers(data: Any) -> None:
    assert data("hub") == {"train": "hf:org/rows?split=train&config=en", "columns": ALPACA}
    assert data("elsewhere")["train"] == "/corpora/rows.json"
    assert data("hub", max_samples=9)["train"] == "hf:org/rows?split=train&config=en&rows=9"
    assert data("scope")["train"] == "ms:org/rows?split=held"
    assert data("org/rows", dataset_dir="ONLINE") == {"train": "hf:org/rows?split=train", "columns": ALPACA}
    assert data("plain", max_samples=9) == {"train": "data/rows.jsonl", "columns": ALPACA, "max_samples": 9}
    several = {"train": "data/rows.jsonl", "mix": {"data/more.json": None}, "columns": ALPACA}
    assert data("plain, more") == several
    held = {"eval_dataset": "more", "eval_strategy": "steps"}
    assert data("plain", **held) == {"train": "data/rows.jsonl", "columns": ALPACA, "eval": "data/more.json"}


def test_files_to_make(converted: Converted, data: Any) -> None:
    """Data sets with other columns, a part of a corpus, and several to evaluate on have no keys."""
    assert data("plain,turns") == {"train": "data/plain+turns.jsonl"}
    assert data("corpus", PRETRAIN, max_samples=9) == {"train": "data/corpus-9.jsonl"}
    held = {"eval_dataset": "plain,more", "eval_strategy": "steps"}
    assert data("plain", **held)["eval"] == "data/plain+more.jsonl"
    notes = converted(ACTION, {**SFT, "dataset": "plain,turns", "max_samples": 7}).notes
    assert any("with the rows of data/rows.jsonl, data/turns.json, the first 7 of each" in note for note in notes)


def test_without_an_index(converted: Converted) -> None:
    found = converted(ACTION, {**SFT, "dataset": "a,b", "max_samples": 1000})
    assert found.recipe["data"]["train"] == "data/a.json"
    assert (found.recipe["data"]["mix"], found.recipe["data"]["max_samples"]) == ({"data/b.json": None}, 1000)
    assert "columns" not in found.recipe["data"]
    remote = converted(ACTION, {**SFT, "dataset": "a", "dataset_dir": "REMOTE:org/index"}).recipe
    assert remote["data"]["train"] == "hf:org/index/a.json"
    assert sum("which defines the source" in note for note in found.notes) == 2


def test_lines_of_a_text_are_documents(converted: Converted, data: Any) -> None:
    assert data("lines", PRETRAIN)["train"] == "data/c.txt"
    assert converted(ACTION, {**PRETRAIN, "dataset": "lines"}).recipe["pretrain"] == {"documents": "lines"}


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("nothing", SFT, "has no data set nothing"),
        ("script", SFT, "neither a file nor on Hugging Face"),
        ("sampled", SFT, "dataset = sampled: its num_samples selects rows"),
        ("folder", SFT, "dataset = folder: its folder is a directory"),
        ("images", SFT, "dataset = images: has images; models read text"),
        ("tools", SFT, "dataset = tools: has tools"),
        ("odd", SFT, "dataset = odd: has tags"),
        ("headed", SFT, "dataset = headed: has a system column"),
        ("answer", SFT, "for the question or the answer"),
        ("pairs", SFT, "dataset = pairs: is for another stage"),
        ("wanted", SFT, "dataset = wanted: is for another stage"),
        ("plain", DPO, "dataset = plain: is for another stage"),
        ("plain", PRETRAIN, "has no single text column"),
        ("one", DPO, "dataset = one: names no column for the question or the answer"),
        ("roles", DPO, "role/content that are not lists"),
    ],
)
def test_what_has_no_counterpart_is_refused(name: str, base: dict[str, Any], message: str, data: Any) -> None:
    with pytest.raises(UserError, match=message):
        data(name, base)


def test_evaluation_has_the_same_columns(data: Any) -> None:
    with pytest.raises(UserError, match="eval_dataset = turns: has other columns"):
        data("plain", eval_dataset="turns", eval_strategy="steps")


def test_the_columns_fit_a_format(data: Any, tmp_path: Path) -> None:
    """Rows as LLaMA-Factory reads them are read with the columns that the recipe has."""
    turn = {"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    rows: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("plain", SFT, "conversation", {"instruction": "Hi?", "input": "", "output": "Hello.", "history": 3}),
        ("named", SFT, "conversation", {"question": "Hi?", "answer": "Hello.", "role": "Be brief."}),
        ("turns", SFT, "conversation", {"dialogue": [*turn], "head": "Be brief.", "tools": 3}),
        ("chat", SFT, "conversation", {"m": chat}),
        ("pairs", DPO, "preference", {"c": [turn[0]], "a": turn[1], "b": {"from": "gpt", "value": "No."}}),
        ("texts", DPO, "preference", {"q": "Hi?", "a": "Hello.", "b": "No."}),
        ("three", DPO, "preference", {"q": "Hi?", "i": "", "a": "Hello.", "b": "No."}),
        ("wanted", {**SFT, "stage": "kto"}, "unpaired", {"m": chat, "label": True}),
    ]
    formats = {spec.name: spec for spec in llmsuite_register_data_formats()}
    for name, base, kind, row in rows:
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row))
        (found,) = read_rows(path, kind, "auto", formats, columns=ColumnRules(data(name, base)["columns"]))
        assert "Hello." in str(found)
