"""Broken data of every kind people have: each is refused with file, line and reason, or skipped and counted."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.data import compressed
from llmsuite.data.keys import ColumnRules
from llmsuite.data.read import read_rows
from tests.support.sft_case import make_stage

GOOD = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]}
LINE = json.dumps(GOOD).encode()
USER, ANSWER = GOOD["messages"]


def second(line: bytes) -> bytes:
    """A sound row, the given one, and a sound one."""
    return b"%b\n%b\n%b\n" % (LINE, line, LINE)


def row(**keys: Any) -> bytes:
    return second(json.dumps(keys).encode())


def messages(*turns: Any) -> bytes:
    return row(messages=list(turns))


def said(turn: Any) -> bytes:
    return row(messages=[USER, turn])


BROKEN: dict[str, tuple[bytes, str]] = {
    "bad utf-8": (second(b'{"messages": "\xff"}'), "is not UTF-8: invalid start byte"),
    "latin 1": (second('{"messages": "é"}'.encode("latin-1")), "is not UTF-8"),
    "utf-16": (second(LINE.decode().encode("utf-16")), "is not UTF-8"),
    "half a line": (second(LINE[:-20]), "is not a JSON line: "),
    "two rows on a line": (second(LINE + LINE), "is not a JSON line: Extra data"),
    "single quotes": (second(str(GOOD).encode()), "is not a JSON line: Expecting property name"),
    "a comma too many": (second(LINE[:-1] + b",}"), "is not a JSON line"),
    "no json": (second(b"hello"), "is not a JSON line: Expecting value"),
    "bom inside": (second(b"\xef\xbb\xbf" + LINE), "is not a JSON line"),
    "nul": (second(b"\0\0\0"), "is not a JSON line"),
    "newline in a text": (second(LINE.replace(b"Hi?", b"Hi\x0b?")), "is not a JSON line: Invalid control character"),
    "nested too deep": (second(b"[" * 100_000), "is not a JSON line: maximum recursion depth"),
    "number without end": (second(b'{"messages": %b}' % (b"1" * 5000)), "is not a JSON line: Exceeds the limit"),
    "a list": (second(b"[1, 2]"), "is a list, not an object"),
    "null": (second(b"null"), "is a NoneType, not an object"),
    "nan": (second(LINE[:-1] + b', "score": NaN}'), "has NaN, which is no JSON"),
    "infinity": (second(LINE[:-1] + b', "score": -Infinity}'), "has -Infinity, which is no JSON"),
    "key twice": (second(LINE[:-1] + b', "messages": []}'), "has the key 'messages' twice"),
    "key twice inside": (second(LINE.replace(b'"role": "user"', b'"role": "user", "role": "user"')), "'role' twice"),
    "half a surrogate": (second(LINE.replace(b"Hi?", b"\\ud83d")), "has half of a surrogate pair"),
    "no key": (row(text="a"), "has no key 'messages'; openai needs: messages of role/content"),
    "empty object": (row(), "has no key 'messages'"),
    "no turns": (messages(), "'messages' is not a list of turns"),
    "turns are text": (row(messages="Hi?"), "'messages' is not a list of turns"),
    "a turn is text": (messages("Hi?"), "'messages[0]' is not an object with 'role'"),
    "a turn is null": (messages(None, ANSWER), "'messages[0]' is not an object with 'role'"),
    "no role": (messages({"content": "Hi?"}), "'messages[0]' is not an object with 'role'"),
    "unknown role": (said({"role": "bot", "content": "a"}), "'messages[1]' has the unknown role 'bot'"),
    "role of another type": (said({"role": 3, "content": "a"}), "'messages[1]' has the unknown role 3"),
    "turns of the other kind": (
        messages({"from": "human", "value": "Hi?"}),
        "'messages[0]' is not an object with 'role' and 'content'; turns with 'from' are conversations: name all "
        'fields in data.columns, such as {"conversations": "messages"}',
    ),
    "pictures": (row(**GOOD, images=["a.png"]), "has images, and only text is read; name the columns of text in "),
    "another format": (
        row(instruction="a", output="b"),
        "has no key 'messages'; openai needs: messages of role/content",
    ),
    "no content": (said({"role": "assistant"}), "'messages[1]' has no key 'content'"),
    "content of another type": (
        said({"role": "assistant", "content": 7}),
        "'messages[1].content' is an integer, not text",
    ),
    "weight of another type": (said({**ANSWER, "weight": "1"}), "'messages[1].weight' is '1'; 0 or a number"),
    "a user to learn": (messages({**USER, "weight": 1}, ANSWER), "is of 'user'; only the assistant's turns"),
    "call without name": (said({**ANSWER, "tool_calls": [{}]}), "has a call without a name"),
    "broken arguments": (
        said({**ANSWER, "tool_calls": [{"name": "add", "arguments": "{"}]}),
        "'arguments of add in messages[1].tool_calls' is not JSON",
    ),
    "broken tools": (row(**GOOD, tools="["), "'tools' is not JSON"),
    "roles out of order": (messages(ANSWER, USER), "the turns are out of order: 'messages[0]' of the assistant"),
    "user twice": (messages(USER, USER, ANSWER), "the turns are out of order: 'messages[1]' of the user"),
    "system at the end": (messages(USER, ANSWER, {"role": "system", "content": "a"}), "'messages[2]' of the system"),
}
"""By name: JSON Lines of which the second one is broken, and what is to be said of it."""


def refusal(path: Path, on_bad_row: str = "error") -> str:
    stage = make_stage(on_bad_row=on_bad_row)
    with pytest.raises(UserError) as caught:
        stage.reader.read(path)
    return str(caught.value)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_refused_by_place(name: str, tmp_path: Path) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}:2: ")
    assert reason in message

    reports: list[str] = []
    assert len(make_stage(report=reports.append, on_bad_row="skip").reader.read(path)) == 2
    assert reports[0].startswith(f"{path}: 2 of 3 rows are used; dropped: 1 that cannot be read: ")
    assert reports[0].endswith(f" (1, first at {path}:2)")


def test_broken_rows_of_all_kinds_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b"\n" + b"".join(content.splitlines()[1] + b"\n" for content, _ in BROKEN.values()))
    reports: list[str] = []
    assert len(make_stage(report=reports.append, on_bad_row="skip").reader.read(path)) == 1
    assert reports[0].startswith(f"{path}: 1 of {len(BROKEN) + 1} rows are used; dropped: {len(BROKEN)} that cannot be")
    assert "is not UTF-8 (3, first at" in reports[0], reports


def test_a_file_without_usable_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{\n[\n")
    assert refusal(path, "skip").startswith(f"{path}: has no rows: 2 that cannot be read: is not a JSON line (2, first")


# files that are broken as a whole: skipping rows does not help


def parquet(**columns: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


FILES: dict[str, tuple[str, bytes, str]] = {
    "cut gz": ("a.jsonl.gz", gzip.compress(second(LINE), mtime=0)[:-9], "cannot be read: Compressed file ended"),
    "no gz": ("a.jsonl.gz", second(LINE), "cannot be read: Not a gzipped file"),
    "damaged gz": ("a.jsonl.gz", gzip.compress(second(LINE), mtime=0)[:30] + bytes(40), "cannot be read: "),
    "no zst": ("a.jsonl.zst", second(LINE), "cannot be read: zstd decompress error: Unknown frame descriptor"),
    "gz bomb": ("a.jsonl.gz", gzip.compress(bytes(3 << 20), mtime=0), "unpacks to more than 100 times its size"),
    "bomb of lines": ("a.jsonl.gz", gzip.compress(second(LINE) * 20_000, mtime=0), "unpacks to more than 100 times"),
    "zst bomb": ("a.json.zst", zstandard.compress(bytes(3 << 20)), "unpacks to more than 100 times its size"),
    "no parquet": ("a.parquet", b"PAR1", "cannot be read: "),
    "cut parquet": ("a.parquet", parquet(messages=[GOOD["messages"]])[:-8], "cannot be read: "),
    "empty": ("a.jsonl", b"", "has no rows"),
    "blank": ("a.jsonl", b"\n\n \n", "has no rows"),
    "half a list": ("a.json", b"[%b,\n%b" % (LINE, LINE[:-5]), ":2: is not JSON: "),
    "list without end": ("a.json", b"[%b,\n%b\n" % (LINE, LINE), ":3: is not JSON: ',' or ']' is missing after row 2"),
    "rows of one line": (
        "a.json",
        b"%b %b" % (LINE, LINE),
        ":1: is not JSON: there is more after it; a file with one row per line is called",
    ),
    "list as lines": ("a.jsonl", b"[\n%b,\n%b\n]" % (LINE, LINE), ":1: begins a list of rows over several lines; give"),
    "an object": ("a.json", LINE, "is a dict, not a list of rows"),
    "bad utf-8 in a list": ("a.json", b"[%b,\n\xff]" % LINE, ":2: is not UTF-8"),
    "another shape": ("a.jsonl", b'{"question": 1}\n', ":1: keys ['question'] fit no format with conversation rows"),
}


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_refused_by_name(
    name: str, on_bad_row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "_MIN_BUDGET_BYTES", 1 << 20)
    file, content, reason = FILES[name]
    (tmp_path / file).write_bytes(content)
    message = refusal(tmp_path / file, on_bad_row)
    assert message.startswith(f"{tmp_path / file}:")
    assert reason in message


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(second(b" " * (1 << 20)))
    assert refusal(path) == f"{path}:2: is longer than 1 MiB, so it is no row of data"


def test_a_long_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(second(LINE.replace(b"Hello.", b"word " * 200_000)))
    reports: list[str] = []
    assert len(make_stage(report=reports.append).reader.read(path)) == 2
    assert "2 of 3 rows are used; dropped: 1 longer than data.max_length 512" in reports[0]


def test_rows_that_only_look_broken_are_read(tmp_path: Path, registry: Registry) -> None:
    for name, content in {
        "a.jsonl": b"\xef\xbb\xbf" + second(LINE),
        "b.jsonl": second(LINE).replace(b"\n", b"\r\n\r\n"),
        "c.jsonl.gz": gzip.compress(second(LINE)[:-1]) + gzip.compress(b"\n"),
        "d.jsonl.zst": zstandard.compress(second(LINE)),
        "e.json": b"\xef\xbb\xbf [%b\n,%b , %b ]\n\n" % (LINE, LINE, LINE),
        "f.json.gz": gzip.compress(b"[%b,%b,%b]" % (LINE, LINE, LINE)),
        "g.parquet": parquet(messages=[GOOD["messages"]] * 3, id=[1, 2, None]),
    }.items():
        (tmp_path / name).write_bytes(content)
        columns = ColumnRules(ignored=["id"])
        rows = read_rows(tmp_path / name, "conversation", "auto", registry.data_formats, columns=columns)
        assert len(rows) == 3, name
        assert len(set(rows.places)) == 3
    rows = read_rows(tmp_path, "conversation", "auto", registry.data_formats, columns=columns)
    assert len(rows) == 21  # a directory is its files


def test_every_row_of_a_list_has_its_line(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, GOOD, GOOD], indent=1))
    rows = read_rows(path, "conversation", "auto", registry.data_formats)
    text = path.read_text().splitlines()
    lines = [int(place.split(":")[1]) for place in rows.places]
    assert lines == [i for i, line in enumerate(text, 1) if line == " {"]


# a template that cannot say a row


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }} {% endfor %}", "does not mark the end of messages[1]"),
        ("{{ messages[-1].content }}", "renders what is before messages[1] differently once it follows"),
        ("{{ raise_exception('no') }}", "refuses the turns"),
        (
            "{% for m in messages %}{{ m.role }}{{ eos_token }}{% endfor %}",
            "leaves out a part of the content of messages[1]",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_refused_with_the_line(template: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + json.dumps({"messages": [USER, ANSWER, USER, ANSWER]}).encode())
    with pytest.raises(UserError) as caught:
        make_stage(template=template).reader.read(path)
    assert str(caught.value).startswith(f"{path}:2: chat template of a stranger ")
    assert reason in str(caught.value)
    with pytest.raises(UserError, match=r"none of its 1 rows can train anything: 1 that cannot be read: chat template"):
        make_stage(template=template, on_bad_row="skip").reader.read(path)
