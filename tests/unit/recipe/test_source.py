"""The strict JSON reader says what is wrong with a text, and at which line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.recipe.document import read_document
from llmsuite.recipe.source import MAX_BYTES, MAX_DEPTH, parse_json


def defects(text: str) -> list[tuple[str, str, str]]:
    with pytest.raises(RecipeError) as caught:
        parse_json(text, "f")
    return [(p.where.removeprefix("f:"), p.key, p.message) for p in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "where", "key", "says"),
    [
        # the same key twice: the second one is reported, and where the first is
        ('{"a": 1,\n "a": 2}', "2:2", "a", "given twice; it was already set at f:1:2"),
        ('{"a": 1, "\\u0061": 2}', "1:10", "a", "given twice"),
        ('{"s": {"a": 1,\n\n  "a": 1}}', "3:3", "s.a", "given twice; it was already set at f:1:8"),
        ('{"s": 1, "s": {"a": [1,]}}', "1:23", "s.a", "trailing comma"),
        # what is no JSON number
        ('{"a":\n NaN}', "2:2", "a", "NaN is not a JSON number"),
        ('{"a": [Infinity]}', "1:8", "a.0", "Infinity is not a JSON number"),
        ("[1, -Infinity]", "1:5", "1", "-Infinity is not a JSON number"),
        ('{"a": nan}', "1:7", "a", "nan is not a JSON number"),
        ('{"a": inf}', "1:7", "a", "inf is not a JSON number"),
        ("[01]", "1:2", "0", "found '01'; numbers look like"),
        ("[1.]", "1:2", "0", "found '1.'"),
        ("[.5]", "1:2", "0", "found '.5'"),
        ("[+1]", "1:2", "0", "found '+1'"),
        ("[1e]", "1:2", "0", "found '1e'"),
        ("[1_000]", "1:2", "0", "found '1_000'"),
        ("[0x10]", "1:2", "0", "found '0x10'"),
        ("[1\u0662]", "1:2", "0", "found '1\u0662'"),  # digits of other scripts
        ("[-]", "1:2", "0", "found '-'"),
        # numbers that JSON allows and a recipe cannot hold
        ('{"a": 9223372036854775808}', "1:7", "a", "does not fit into 64 bits"),
        ('{"a": -9223372036854775809}', "1:7", "a", "does not fit into 64 bits"),
        ("[1" + "0" * 5000 + "]", "1:2", "0", "does not fit into 64 bits"),
        ('{"a": 1e999}', "1:7", "a", "1e999 is too large"),
        ("[0.0,\n-1e999]", "2:1", "1", "-1e999 is too large"),
        # separators
        ('{"a": 1,\n}', "1:8", "", "trailing comma; remove it or add the missing key"),
        ('{"a": [1, 2,\n]}', "1:12", "a", "trailing comma; remove it or add the missing value"),
        ("[,]", "1:2", "0", "expected a value, found ','"),
        ("[1,,2]", "1:4", "1", "expected a value, found ','"),
        ("{,}", "1:2", "", "expected a key"),
        ('{"a": 1\n "b": 2}', "2:2", "", "expected ',' or '}'"),
        ('{"s": [1 2]}', "1:10", "s", "expected ',' or ']'"),
        ('{"a" 1}', "1:6", "a", "expected ':'"),
        ('{"a"}', "1:5", "a", "expected ':'"),
        ('{"a":}', "1:6", "a", "expected a value, found '}'"),
        # comments and quotes
        ('{\n // why\n "a": 1}', "2:2", "", "no comments"),
        ('{"a": 1 /* why */}', "1:9", "", "no comments"),
        ('# why\n{"a": 1}', "1:1", "", "no comments"),
        ("{'a': 1}", "1:2", "", "key in double quotes"),
        ("{\"a\": 'b'}", "1:7", "a", "strings need double quotes"),
        ('{"a": b}', "1:7", "a", "found 'b'; strings need double quotes"),
        ("{a: 1}", "1:2", "", "key in double quotes"),
        ('{"a": True}', "1:7", "a", "found 'True'; write true"),
        ('{"a": None}', "1:7", "a", "found 'None'; write null"),
        # strings
        ('{"a": "b}', "1:7", "a", "unterminated string"),
        ('{"a', "1:2", "", "unterminated string"),
        ('{"a": "b\nc"}', "1:9", "a", "invalid control character"),
        ('{"a": "\\x"}', "1:8", "a", "invalid \\escape"),
        ('{"a": "\\ud800"}', "1:7", "a", "half of a surrogate pair"),
        # beginning and end
        ("\ufeff{}", "1:1", "", "byte order mark"),
        ('{"a": 1}\n\n{}', "3:1", "", "text after the end"),
        ("{} ]", "1:4", "", "text after the end"),
        ("", "1:1", "", "expected a value, found the end of the file"),
        ("\n  ", "2:3", "", "expected a value, found the end of the file"),
        ('{"a": 1', "1:8", "", "expected ',' or '}'"),
        ('{"a": [', "1:8", "a.0", "found the end of the file"),
    ],
)
def test_a_defect_has_its_place(text: str, where: str, key: str, says: str) -> None:
    assert [(w, k) for w, k, message in defects(text) if says in message] == [(where, key)]


def test_all_problems_of_a_text_are_reported_in_order() -> None:
    text = '{\n "a": NaN,\n "a": 1e999,\n "b": [1, 2,],\n "c": 99999999999999999999,\n}'
    assert [(where, key, message.split(";")[0]) for where, key, message in defects(text)] == [
        ("2:7", "a", "NaN is not a JSON number"),
        ("3:2", "a", "is given twice"),
        ("3:7", "a", "1e999 is too large for a number"),
        ("4:12", "b", "trailing comma"),
        ("5:7", "c", "integer does not fit into 64 bits"),
        ("5:27", "", "trailing comma"),
    ]


def test_defects_before_one_that_stops_the_reading_are_kept() -> None:
    assert [where for where, _, _ in defects('{"a": NaN, "b": oops, "c": NaN}')] == ["1:7", "1:17"]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_too_deep_is_refused(opening: str, closing: str) -> None:
    deepest = MAX_DEPTH - 1
    parse_json(opening * deepest + "0" + closing * deepest, "f")
    ((where, key, message),) = defects(opening * MAX_DEPTH + "0" + closing * MAX_DEPTH)
    assert where == f"1:{len(opening) * MAX_DEPTH + 1}"
    assert key.count(".") == MAX_DEPTH - 1
    assert message == "is nested deeper than 64 levels"


@pytest.mark.parametrize("text", ["[" * 500_000, '{"a":' * 100_000, "[" + "1" * 900_000 + "]", '"' + "\\" * 900_001])
def test_hostile_text_is_refused_without_much_work(text: str) -> None:
    assert len(defects(text)) == 1


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 0, -0.0, 5e-324, 1.7976931348623157e308])
def test_extreme_numbers_that_fit(value: float) -> None:
    assert repr(parse_json(repr(value), "f").value) == repr(value)


def test_file_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes('{"a": 1,\n "\u00e9\u00e9": "'.encode() + b'\xff"}')
    with pytest.raises(RecipeError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:2:9"
    assert "is not UTF-8" in problem.message


def test_file_with_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(RecipeError, match=r"r\.json:1:1: starts with a byte order mark"):
        read_document(path)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("1".ljust(MAX_BYTES))
    assert read_document(path).value == 1
    path.write_text("1".ljust(MAX_BYTES + 1))
    with pytest.raises(UserError, match=r"r.json: is too long; a recipe has at most 200,000 bytes"):
        read_document(path)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.json: cannot be read: No such file"):
        read_document(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="is a directory; a recipe is a file"):
        read_document(tmp_path)
    with pytest.raises(UserError, match=r"is not a path: .*File name too long"):
        read_document("x" * 300)
    with pytest.raises(UserError, match=r"is not a path: .*home directory"):
        read_document("~nobody-of-that-name/r.json")


def test_bundled_file_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_document("recipes/llama/dpo.json").value["stage"] == "dpo"
