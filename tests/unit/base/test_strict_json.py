"""Untrusted JSON: invalid JSON is refused with the key, and values of another kind do not reach later code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_file, read_json_object, read_weight_map
from llmsuite.base.strict_json import (
    ABOVE_ZERO,
    MAX_DEPTH,
    NULL,
    NUMBER,
    TEXT,
    by_name,
    check_kinds,
    list_of,
    parse_json,
)
from llmsuite.base.strict_json import integer as whole_number
from tests.support.damage import values

REFUSED = {
    '{"a": {"b": [1, NaN]}}': r"a\.b\[1\] is NaN",
    '{"a": -Infinity}': "a is -Infinity",
    '{"a": 1e999}': "a is 1e999",
    "NaN": "it is NaN",
    '{"a": 1, "b": 2, "a": 3}': "'a' is there twice",
    '{"a": "\\ud800"}': "half of a surrogate pair",
    '{"\\udfff": 1}': "half of a surrogate pair",
    '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}": "nested deeper than 100",
    "[" * 100_000: "nested deeper than 100",
    "{": "Expecting property name",
    "1" * 5000: "digits",
}


@pytest.mark.parametrize("text", REFUSED, ids=[f"{text[:20]}" for text in REFUSED])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=rf"x\.json: is not JSON: .*{REFUSED[text]}"):
        read_json_file(tmp_path / "x.json")


def test_what_is_json_is_read() -> None:
    text = '{"a": [1, 2.5, -1e30, null, true, "\\ud83d\\ude00"], "b": {}}'
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None


@given(values)
def test_what_is_read_can_be_written_again(value: Any) -> None:
    try:
        found = parse_json(json.dumps(value))
    except ValueError:
        return
    assert json.loads(json.dumps(found, ensure_ascii=False, allow_nan=False).encode()) == found


def test_an_object_is_needed(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(UserError, match=r"x\.json: is a list, not an object"):
        read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": "../b"}, {"a": "b/c"}, {"a": "b\0"}])
def test_an_index_names_files_of_its_directory(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"index\.json: "):
        read_weight_map(tmp_path / "index.json")


@given(st.one_of(st.floats(), st.integers(), st.just(10**400), values))
def test_numbers_that_pass_can_be_computed_with(value: Any) -> None:
    if NUMBER.fits(value):
        assert math.isfinite(float(value))
        assert type(value) in (int, float)
    if ABOVE_ZERO.fits(value):
        assert 0 < 1 / float(value) < math.inf


def test_a_key_of_another_kind_is_named() -> None:
    kinds = {"r": whole_number(1, 8), "names": list_of(TEXT) | NULL, "alphas": by_name(NUMBER)}
    check_kinds("x.json", {"r": 8, "alphas": {"a": 0.5}}, kinds)
    for data, said in (
        ({"r": 0}, "r is 0; a whole number from 1 to 8 is needed"),
        ({"r": True}, "r is True"),
        ({"r": 1, "names": ["a", 1]}, r"names is \['a', 1\]; a list \(each a text\) or null is needed"),
        ({"r": 1, "alphas": {"a": 10**40}}, r"alphas is .*; an object \(each value a number\) is needed"),
        ({"r": 1}, "alphas is None"),
    ):
        with pytest.raises(UserError, match=rf"^x\.json: {said}"):
            check_kinds("x.json", data, kinds)
