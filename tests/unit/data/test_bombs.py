"""Files of rows that are small and stand for much: time and memory are in proportion to their bytes."""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from llmsuite.base.errors import UserError
from llmsuite.data.conversation_formats import BUILTIN
from llmsuite.data.documents import read_documents
from llmsuite.data.read import raw_rows
from llmsuite.data.row_kinds import _needed

MANY = 50_000


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path, dictionary_pagesize_limit=1 << 26, **options)
    return path


def rows_of(path: Path) -> list[Any]:
    return [row for _, row, _ in raw_rows(path)]


def test_a_repeated_dictionary_value_counts_each_time(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, "int32"), pa.array(["x" * (8 << 20)]))
    path = write(tmp_path / "a.parquet", {"text": text}, compression="zstd")
    assert path.stat().st_size < 10_000
    began = time.process_time()
    rows = raw_rows(path)
    assert len(next(rows)[1]["text"]) == 8 << 20
    with pytest.raises(UserError, match=r"a\.parquet: unpacks to more than 100 times its size"):
        collections.deque(rows, 0)
    with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
        collections.deque(read_documents(path, "files", "text"), 0)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("nested", [False, True])
def test_a_row_has_the_size_limit_of_a_line(tmp_path: Path, nested: bool) -> None:
    numbers = pa.array([0] * 100, "int32")
    texts: Any = pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * (1 << 20)])).cast("string")
    if nested:
        texts = pa.StructArray.from_arrays([texts], ["content"])
    turns = pa.ListArray.from_arrays(pa.array([0, 1, 100], "int32"), texts)
    path = write(tmp_path / "a.parquet", {"messages": turns}, compression="zstd")
    rows = raw_rows(path)
    assert len(next(rows)[1]["messages"]) == 1
    with pytest.raises(UserError, match=r"a\.parquet: row 2 is longer than 64 MiB"):
        next(rows)


def test_a_footer_of_many_values_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"n": pa.nulls(70_000_000, "int8")}, compression="zstd")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
        next(raw_rows(path))


def test_every_kind_of_column_is_read_as_before(tmp_path: Path) -> None:
    talk = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    columns = {
        "messages": pa.array([[{"role": "user", "content": "hi"}], [], None], talk),
        "text": ["a", None, "ä"],
        "bytes": pa.array([b"1", None, b"\xff"]),
        "map": pa.array([[("k", "v")], [], None], pa.map_(pa.string(), pa.string())),
        "category": pa.array(["a", "b", "a"]).dictionary_encode(),
        "large": pa.array([["a", None], [], None], pa.large_list(pa.large_string())),
        "fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        "number": [1.5, None, 2.0],
        "null": pa.nulls(3),
    }
    path = write(tmp_path / "a.parquet", columns, row_group_size=2)
    assert rows_of(path) == pyarrow.parquet.read_table(path).to_pylist()


def test_invalid_utf8_is_refused(tmp_path: Path) -> None:
    broken = pa.array([b"a", b"\xff\xfe"]).view("string")
    with pytest.raises(UserError, match=r"a\.parquet: row 1 or a later one cannot be read"):
        rows_of(write(tmp_path / "a.parquet", {"text": broken}))


def test_a_table_of_many_columns_takes_time_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    header = ",".join(f"c{i}" for i in range(4 * MANY))
    path.write_text(f"{header}\n" + "a\n" * 10_000)
    began = time.process_time()
    faults = [fault for _, _, fault in raw_rows(path)]
    assert len(faults) == 10_000
    assert max(len(str(fault)) for fault in faults) < 500
    path.write_text(f"{header},c7\n")
    with pytest.raises(UserError, match="names the column 'c7' twice"):
        rows_of(path)
    assert time.process_time() - began < 10


def test_a_row_of_many_keys_takes_time_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    keys = ", ".join(f'"c{i}": 1' for i in range(MANY))
    path.write_text(f'{{{keys}, "c9": 2}}\n')
    began = time.process_time()
    ((_, _, fault),) = raw_rows(path)
    assert fault == "has the key 'c9' twice"
    row = {**{f"c{i}": 1 for i in range(MANY)}, **json.loads('{"instruction": "a", "output": "b"}')}
    alpaca = next(found for found in BUILTIN if found.name.startswith("alpaca"))
    assert "instruction" in _needed(alpaca, row)
    assert time.process_time() - began < 20
