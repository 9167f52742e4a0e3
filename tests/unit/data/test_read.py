"""Rows from files: every fault is named with file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.hookspecs import DataFormat
from llmsuite.data.keys import ColumnRules
from llmsuite.data.preference_formats import BUILTIN
from llmsuite.data.read import raw_rows, read_rows
from llmsuite.data.rows import Message, Preference
from tests.support.paths import DATA, REAL

FORMATS = {data_format.name: data_format for data_format in BUILTIN}

ROW = {"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad."}
LINE = json.dumps(ROW)


def read(path: Path, name: str = "auto") -> list[Any]:
    return read_rows(path, "preference", name, FORMATS, columns=ColumnRules(ignored=["task", "answer", "extra"]))


def write(directory: Path, content: str | bytes, name: str = "rows.jsonl") -> Path:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, name: str = "auto") -> str:
    with pytest.raises(UserError) as caught:
        read(path, name)
    return str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        f"{LINE}\n{LINE}\n",
        f"{LINE}\n{LINE}",
        f"{LINE}\r\n{LINE}\r\n",
        f"\n{LINE}\n  \n\n{LINE}\n\n",
        f"\ufeff{LINE}\n{LINE}\n",
    ],
)
def test_rows_of_json_lines_are_read(tmp_path: Path, content: str) -> None:
    assert (
        read(write(tmp_path, content))
        == [Preference((Message("user", "Hi?"),), Message("assistant", "Good."), Message("assistant", "Bad."))] * 2
    )


@pytest.mark.parametrize("content", [f"[{LINE}, {LINE}]", f"\ufeff[\n{LINE},\n{LINE}\n]\n"])
def test_a_json_list_is_read(tmp_path: Path, content: str) -> None:
    assert len(read(write(tmp_path, content, "rows.json"))) == 2


def test_line_ends_of_unicode_end_no_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    row = json.dumps({**ROW, "chosen": text}, ensure_ascii=False)
    assert "\u2028" in row
    assert read(write(tmp_path, f"{row}\n{row}\n"))[1].chosen.content == text


def test_text_is_kept_to_the_letter(tmp_path: Path) -> None:
    text = " \u4e16\u754c \U0001f600 e\u0301 <|im_end|> \\n \t "
    for ascii_only in (True, False):
        path = write(tmp_path, json.dumps({**ROW, "rejected": text}, ensure_ascii=ascii_only))
        assert read(path)[0].rejected.content == text


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"%b\n\xff\xfe{}\n" % LINE.encode(), 2, ["is not UTF-8"]),
        (b"%b\n%b\n{'a': '\xe4'}" % (LINE.encode(), LINE.encode()), 3, ["is not UTF-8"]),
        (b"%b\r\n\r\n\xe4" % LINE.encode(), 3, ["is not UTF-8"]),
        (f"{LINE}\n{LINE[:-20]}\n", 2, ["is not a JSON line", "line 1 column"]),
        (f"{LINE}\n\n{LINE}{LINE}\n", 3, ["is not a JSON line: Extra data"]),
        (f"{LINE}\nhello\n", 2, ["is not a JSON line"]),
        (f"{LINE}\n" + "[" * 100_000, 2, ["is not a JSON line", "recursion"]),
        (f"{LINE}\n" + '{"prompt": ' * 100_000, 2, ["is not a JSON line", "recursion"]),
        (f"{LINE}\n[1]\n", 2, ["is a list, not an object"]),
        (f"{LINE}\n7\n", 2, ["is a int, not an object"]),
        (f"{LINE}\n" + '"text"', 2, ["is a str, not an object"]),
        (f'{LINE}\n{{"prompt": "a", "chosen": "b"}}', 2, ["has no key 'rejected'", "trl_preference needs: prompt"]),
        (f'{LINE}\n{{"prompt": "a", "chosen": 7, "rejected": "c"}}', 2, ["'chosen' is neither text nor a list"]),
        (LINE + '\n{"prompt": "a", "chosen": "b", "rejected": "\\ud83d"}', 2, ["half of a surrogate pair", "\\ud800"]),
        (LINE + '\n{"prompt": "a", "chosen": "b", "rejected": "c", "\\udc00": 1}', 2, ["half of a surrogate pair"]),
    ],
    ids=range(15),
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, content: str | bytes, line: int, words: list[str]) -> None:
    path = write(tmp_path, content)
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: ")
    for word in words:
        assert word in message


def test_a_directory_of_corpora_is_none_of_rows(tmp_path: Path) -> None:
    for name in ("b.idx", "b.bin", "a.idx", "a.bin"):
        (tmp_path / name).touch()
    said = f"name one, others in pretrain.mix: {tmp_path}/a, {tmp_path}/b"
    assert refusal(tmp_path) == f"{tmp_path}: is a directory of indexed corpora; {said}"


def test_one_row_a_line_may_be_called_json(tmp_path: Path) -> None:
    """As PaddleNLP's train.json is."""
    path = write(tmp_path, f"\n{LINE}\n\n{LINE}\n", "rows.json")
    assert [(where, row, fault) for where, row, fault in raw_rows(path)] == [
        (f"{path}:2", ROW, None), (f"{path}:4", ROW, None)
    ]  # fmt: skip
    assert refusal(write(tmp_path, f"{LINE}\n{LINE[:-3]}\n", "half.json")).startswith(
        f"{tmp_path}/half.json:2: is not a"
    )
    assert "there is more after it" in refusal(write(tmp_path, "{\n}\n{\n}\n", "spread.json"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["is not JSON", "line 1 column 1"]),
        (f"[{LINE} {LINE}]", ["is not JSON: ',' or ']' is missing after row 1"]),
        (f"[{LINE}] 1", ["is not JSON: there is more after the list: '1'"]),
        ("[]", ["has no rows"]),
        ("{}", ["is a dict, not a list of rows"]),
        ('"text"', ["is a str, not a list of rows"]),
        (f"[{LINE},", ["is not JSON", "line 1 column"]),
        (f"{LINE} {LINE}", ["is not JSON: there is more after it; a file with one row per line is called .jsonl"]),
        ("[" * 100_000, ["is not JSON", "recursion"]),
        (f"[{LINE}, 3]", ["row 2: is a int, not an object"]),
        (f'[{LINE}, {{"prompt": 1, "chosen": "a", "rejected": "b"}}]', ["row 2: 'prompt' is neither text"]),
        (f'[{LINE},\n{{"a": "\\udc12"}}]', ["row 2: has half of a surrogate pair"]),
    ],
    ids=range(12),
)
def test_a_fault_in_a_json_list_is_named_with_its_row(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write(tmp_path, content, "rows.json")
    message = refusal(path)
    line = 2 if "\n" in content else 1
    assert message.startswith(f"{path}: " if "list of rows" in message or "no rows" in message else f"{path}:{line}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert refusal(path) == f"{path}: has no rows"


def test_a_nested_row_is_read_or_refused_at_any_depth(tmp_path: Path) -> None:
    refused = []
    for depth in [100, 200, 400, *range(700, 1100), 100_000]:  # Python 3.10 and 3.11 give up below 1000
        path = write(tmp_path, LINE[:-1] + ', "extra": ' + "[" * depth + "]" * depth + "}")
        try:
            assert len(read(path)) == 1
        except UserError as error:
            refused.append((depth, str(error)))
    assert all(depth > 400 and message.startswith(f"{path}:1: is ") for depth, message in refused)
    assert refused


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert "absent.jsonl: cannot be read: No such file" in refusal(tmp_path / "absent.jsonl")
    assert "cannot be read: is a directory without .json, .jsonl, .parquet, .csv, .tsv files" in refusal(tmp_path)
    message = refusal(tmp_path / "sheet.XLSX")
    assert message.endswith("sheet.XLSX: .XLSX files are not read; save it as .csv, .jsonl or .parquet")


def test_ten_faults_are_shown_and_the_rest_counted(tmp_path: Path) -> None:
    bad = json.dumps({**ROW, "chosen": 1})
    path = write(tmp_path, "\n".join([LINE, *[bad] * 5, LINE, "3", *[bad] * 6]))
    lines = refusal(path).split("\n")
    assert lines[-1] == "and 2 more"
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path}:{n}" for n in (2, 3, 4, 5, 6, 8, 9, 10, 11, 12)]
    path = write(tmp_path, "\n".join([LINE, *[bad] * 10]))
    assert len(refusal(path).split("\n")) == 10


def test_unrecognised_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '\n{"text": "a", "id": 1}\n')
    message = refusal(path)
    assert message.startswith(f"{path}:2: keys ['id', 'text'] fit no format with preference rows. Known: ")
    for name in FORMATS:
        assert name in message
    with pytest.raises(UserError, match=r"Known: none$"):
        read_rows(path, "text", "auto", FORMATS)


def test_the_first_row_decides_and_the_others_have_to_follow(tmp_path: Path) -> None:
    other = json.dumps({"src": "Hi?", "response": ["a", "b"], "sort": [1, 0]})
    path = write(tmp_path, f"{LINE}\n{other}\n")
    assert refusal(path) == (
        f"{path}:2: has no key 'chosen'; trl_preference needs: prompt, chosen, rejected; text or lists of role/content"
    )


def test_a_format_can_be_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, LINE)
    assert len(read(path, "trl_preference")) == 1
    assert f"{path}:1: has no key 'conversations'" in refusal(path, "sharegpt_preference")


def test_a_format_of_another_kind_is_refused(tmp_path: Path) -> None:
    text = DataFormat(name="lines", help="text", kind="text", matches=lambda row: True, convert=dict)
    path = write(tmp_path, LINE)
    with pytest.raises(UserError, match=r"data\.format: lines gives text rows; this stage trains on preference rows"):
        read_rows(path, "preference", "lines", {**FORMATS, "lines": text})
    # and one that matches everything is not taken for the wrong kind
    assert len(read_rows(path, "preference", "auto", {"lines": text, **FORMATS})) == 1


def test_a_format_that_raises_for_a_row_does_not_fit_it(tmp_path: Path) -> None:
    path = write(tmp_path, LINE)
    broken = DataFormat(
        name="lines", help="lines", kind="preference", matches=lambda row: row["line"], convert=lambda row: None
    )
    assert len(read_rows(path, "preference", "auto", {"lines": broken, **FORMATS})) == 1
    with pytest.raises(UserError, match=":1: `convert` of the data format lines returned nothing"):
        read_rows(path, "preference", "lines", {"lines": broken})


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (
            lambda row: row["prompt"].text,
            "has to raise ValueError with what is wrong in the row: .*AttributeError: 'str'",
        ),
        (lambda row: [][1], "has to raise ValueError with what is wrong in the row: .*IndexError: list index"),
        (lambda row: row["prompt"], r"returned a str; preference rows are llmsuite\.data\.rows\.Preference$"),
    ],
)
def test_a_format_that_returns_no_row_is_named(tmp_path: Path, convert: Callable[[Any], Any], said: str) -> None:
    path = write(tmp_path, LINE)
    lines = DataFormat(name="lines", help="lines", kind="preference", matches=lambda row: True, convert=convert)
    with pytest.raises(UserError, match=re.compile(f":1: `convert` of the data format lines {said}", re.DOTALL)):
        read_rows(path, "preference", "lines", {"lines": lines})


def test_the_embedded_rows_are_read() -> None:
    for split in ("train", "eval"):
        path = DATA / "preference" / f"{split}.jsonl"
        assert len(read(path)) == len(path.read_text().splitlines())


@pytest.mark.parametrize("language", ["en", "zh"])
def test_real_preference_data_are_read(language: str) -> None:
    path = REAL / f"dpo_{language}_demo.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set LLMSUITE_TEST_DATA")
    rows = read(path)
    assert len(rows) == 300
    assert all(row.prompt[-1].role == "user" and row.chosen != row.rejected for row in rows)
    assert any(len(row.prompt) > 1 for row in rows)


def test_null_columns_decide_no_format(tmp_path: Path) -> None:
    pairs = {"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad."}
    null = dict.fromkeys(("conversations", "src", "response", "sort", "instruction"))
    (found,) = read(write(tmp_path, json.dumps({**null, **pairs})))
    assert found.chosen.content == "Good."
