"""The strict JSON reader agrees with `json.loads` on what both accept, and refuses the rest in one way only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.recipe.document import read_document
from llmsuite.recipe.source import MAX_DEPTH, MAX_INT, MIN_INT, Key, Source, parse_json

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(MIN_INT, MAX_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
# pieces that make up JSON and what people take for JSON; joined at random, they are often nearly right
PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", " ", "\n", '"a"', '"b"', '"\\u0061"', '"\\ud800"', '"', "'", "\\", "\x00"),
        *("0", "-", "1", "9", "1.5", "1e9", "1e999", "123456789012345678901", ".", "e", "+", "\u0661"),
        *("NaN", "Infinity", "-inf", "true", "null", "None", "//", "/*", "#", "\ufeff", "\u2028"),
        *('{"a": 1}', '{"a": [1, 2]}', '{"a": 1, "a": ', '"a": 1, '),
    ]
)
LAYOUTS = st.sampled_from([(None, (",", ":")), (None, (" , ", "\n:\t")), (2, (",", ": ")), ("\t", (" ,", ":"))])


def strict(text: str) -> Any:
    """Return the expected result of the reader: that of the standard library without its leniency.

    Raises:
        ValueError: it should refuse the text.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise ValueError("duplicate key")
        return dict(items)

    def integer(token: str) -> int:
        if not MIN_INT <= int(token) <= MAX_INT:
            raise ValueError("large integer")
        return int(token)

    def number(token: str) -> float:
        if math.isinf(float(token)):
            raise ValueError("large number")
        return float(token)

    def constant(token: str) -> None:
        raise ValueError(token)

    value = json.loads(text, object_pairs_hook=pairs, parse_int=integer, parse_float=number, parse_constant=constant)
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # halves of surrogate pairs raise a ValueError
    if depth(value) > MAX_DEPTH:
        raise ValueError("depth")
    return value


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inner), default=0)


def offset(text: str, position: str) -> int:
    """Offset in the text of a position `name:line:col`."""
    _, line, column = position.rsplit(":", 2)
    return sum(len(part) + 1 for part in text.split("\n")[: int(line) - 1]) + int(column) - 1


def parts(value: Any, key: Key = ()) -> dict[Key, Any]:
    """Every value in a document, by key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {key: value}
    for name, inner in items:
        found.update(parts(inner, (*key, str(name))))
    return found


@given(VALUES, LAYOUTS, st.booleans())
def test_equal_to_json_loads(value: Any, layout: Any, ascii_only: bool) -> None:
    indent, separators = layout
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    # repr distinguishes 1 from 1.0 and from true, and 0.0 from -0.0
    assert repr(parse_json(text, "f").value) == repr(json.loads(text)) == repr(value)


@given(VALUES, LAYOUTS, st.booleans())
def test_every_position_is_where_the_value_and_its_key_are(value: Any, layout: Any, ascii_only: bool) -> None:
    indent, separators = layout
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=ascii_only)
    source: Source = parse_json(text, "f")
    decoder = json.JSONDecoder()
    expected = parts(value)
    assert source.values.keys() == expected.keys()
    for key, part in expected.items():
        assert repr(decoder.raw_decode(text, offset(text, source.values[key]))[0]) == repr(part)
    in_objects = {key for key in expected if key and isinstance(expected[key[:-1]], dict)}
    assert source.keys.keys() == in_objects
    for key in in_objects:
        name, end = decoder.raw_decode(text, offset(text, source.keys[key]))
        assert name == key[-1]
        assert text[end:].lstrip().startswith(":")


@settings(max_examples=1500)
@given(st.lists(PIECES, max_size=20).map("".join) | st.text(max_size=30))
def test_any_text_is_read_as_the_standard_library_reads_it_or_refused(text: str) -> None:
    try:
        expected = strict(text)
    except ValueError:
        with pytest.raises(RecipeError) as caught:
            parse_json(text, "f")
        for problem in caught.value.problems:
            assert problem.message
            assert 0 <= offset(text, problem.where) <= len(text)
    else:
        assert repr(parse_json(text, "f").value) == repr(expected)


@settings(max_examples=500)
@given(VALUES, st.data())
def test_a_text_with_one_thing_changed(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, indent=1)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 2))
    changed = text[:at] + data.draw(PIECES | st.just("")) + text[at + cut :]
    try:
        expected = strict(changed)
    except ValueError:
        with pytest.raises(RecipeError):
            parse_json(changed, "f")
    else:
        assert repr(parse_json(changed, "f").value) == repr(expected)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("json") / "r.json"


@settings(max_examples=300)
@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        expected = strict(content.decode("utf-8"))
    except ValueError:
        with pytest.raises(UserError):
            read_document(file)
    else:
        assert repr(read_document(file).value) == repr(expected)
