"""Rows of very many parts: read in time by their bytes, or refused with their place and the bound."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.data import compressed, conversation_formats, row_limits
from llmsuite.data.keys import ALL, ColumnRules
from llmsuite.data.read import raw_rows, read_rows
from tests.support.tool_turns import CALL, TOOLS

FORMATS = {data_format.name: data_format for data_format in conversation_formats.BUILTIN}
MANY = 100_000
ASK = {"role": "user", "content": "Hi?"}
ANSWER = {"role": "assistant", "content": "Hello."}


def calling(calls: int) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": str(i)} for i in range(calls)]}


def parts(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "a"}] * count}


def read(directory: Path, row: Any) -> Any:
    path = directory / "rows.jsonl"
    path.write_text(json.dumps({"messages": [ASK, ANSWER]}) + "\n" + json.dumps(row) + "\n")
    return read_rows(path, "conversation", "auto", FORMATS, columns=ColumnRules(ignored=[ALL]))[1]


LARGE = {
    "turns": ({"messages": [ASK, ANSWER] * (MANY // 2)}, "it has 100,000 turns; at most 4,096 are read"),
    "tools": ({"messages": [ASK, ANSWER], "tools": TOOLS * MANY}, "'tools' has 100,000 functions; at most 1,024"),
    "calls": ({"messages": [ASK, calling(MANY)]}, "has 100,000 calls; at most 1,024"),
    "columns": (
        {"messages": [ASK, ANSWER], **{f"c{i}": 1 for i in range(MANY)}},
        "has 100,001 columns; at most 10,000",
    ),
    "text": (
        {"messages": [ASK, ANSWER] * 2000 + [ASK, {**ANSWER, "content": "a" * 600_000}]},
        r"characters and 2,001 supervised turns; at most 1,073,741,824 characters are rendered for a row",
    ),
}


@pytest.mark.parametrize("what", LARGE)
def test_rows_beyond_the_limits_are_refused_by_place(tmp_path: Path, what: str) -> None:
    row, said = LARGE[what]
    began = time.process_time()
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: .*{said}") as caught:
        read(tmp_path, row)
    assert len(str(caught.value)) < 1000
    assert time.process_time() - began < 20


def test_rows_of_agent_size_are_read(tmp_path: Path) -> None:
    tool = {"role": "tool", "content": "sun"}
    talk = [*[ASK, calling(3), tool, ANSWER] * 250, ASK, calling(row_limits.MAX_TOOLS), tool, ANSWER]
    assert len(read(tmp_path, {"messages": talk}).messages) == 1004
    found = read(
        tmp_path, {"messages": [ASK, ANSWER] * (row_limits.MAX_TURNS // 2), "tools": TOOLS * row_limits.MAX_TOOLS}
    )
    assert len(found.messages) == row_limits.MAX_TURNS
    columns = {f"c{i}": 1 for i in range(row_limits.MAX_COLUMNS - 1)}
    assert read(tmp_path, {"messages": [ASK, ANSWER], **columns})


def test_many_text_parts_are_joined(tmp_path: Path) -> None:
    began = time.process_time()
    found = read(tmp_path, {"messages": [parts(MANY), ANSWER]})
    assert found.messages[0].content == "a" * MANY
    assert time.process_time() - began < 20


def test_an_infinite_number_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1e308}\n{"a": -1e999}\n{"a": 2}\n')
    assert [fault for _, _, fault in raw_rows(path)] == [None, "has the number -1e999, which is larger than any", None]


@pytest.mark.parametrize("content", [b"\n", b"1,", b"{},"])
def test_a_file_of_only_line_ends_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.jsonl.gz" if content == b"\n" else "a.json.gz")
    path.write_bytes(gzip.compress((b"" if content == b"\n" else b"[") + content * (50 << 20)))
    began = time.process_time()
    with pytest.raises(UserError, match="or to more rows or objects than any text has"):
        list(raw_rows(path))
    assert time.process_time() - began < 20


def test_padded_rows_of_token_ids_are_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They unpack to some fifty times their size."""
    monkeypatch.setattr(compressed, "_MIN_BUDGET_BYTES", 0)
    chance = random.Random(0)
    rows = []
    for _ in range(100):
        count = chance.randrange(50, 400)
        ids = [chance.randrange(30_000) for _ in range(count)]
        padding = [0] * (2048 - count)
        labels = [*ids, *[-100] * len(padding)]
        rows.append({"input_ids": [*ids, *padding], "attention_mask": [1] * count + padding, "labels": labels})
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert [fault for _, _, fault in raw_rows(path)] == [None] * len(rows)
