"""Strict reading of untrusted JSON, and checks of its values against tables of allowed kinds.

`json.loads` keeps the last of two equal keys, accepts NaN and Infinity as numbers, and turns 1e999 into infinity; each
of these would cause an error far from the file that contains it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError

MAX_DEPTH = 100
"""Most brackets around a value. Code that reads the value recurses once for each, and Python limits recursion."""
LARGEST = 1e30
"""Largest magnitude of a number, and 1 / the smallest positive one: so results of computations stay finite."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""An escaped surrogate; in JSON these occur in pairs."""


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, has a key twice, a number that is not finite, half of a surrogate pair, or more
            than `MAX_DEPTH` brackets around a value. The message names the key.
    """
    text = content if isinstance(content, str) else content.decode()
    odd: list[str] = []

    def number(written: str) -> float:
        value = float(written)
        if not math.isfinite(value):
            odd.append(written)
        return value

    def constant(written: str) -> float:
        odd.append(written)
        return math.nan

    try:
        data = json.loads(text, object_pairs_hook=_object, parse_float=number, parse_constant=constant)
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from error
    if is_nested_deeper(data, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if odd:
        where = next(key for key, value in _walk(data) if isinstance(value, float) and not math.isfinite(value))
        raise ValueError(f"{where or 'it'} is {odd[0][:40]}, which is no finite number")
    if _SURROGATE.search(text):
        for key, value in _walk(data):
            if not _is_encodable(key) or (isinstance(value, str) and not _is_encodable(value)):
                raise ValueError(f"{key!r} has half of a surrogate pair, which is no character")
    return data


@dataclasses.dataclass(frozen=True)
class Kind:
    """A set of allowed values."""

    what: str
    """Description for messages: "a number above 0"."""
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        """Either of two."""
        return Kind(f"{self.what} or {other.what}", lambda value: self.fits(value) or other.fits(value))


def check_kinds(where: Path | str, data: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    """Raise UserError for the first key whose value does not fit its kind in a table; a missing key counts as null."""
    for key, kind in kinds.items():
        if not kind.fits(data.get(key)):
            raise UserError(f"{where}: {key} is {reprlib.repr(data.get(key))}; {kind.what} is needed")


def integer(minimum: int, maximum: int) -> Kind:
    """An integer in a range."""
    return Kind(
        f"a whole number from {minimum:,} to {maximum:,}", lambda value: _is_int(value) and minimum <= value <= maximum
    )


def list_of(kind: Kind) -> Kind:
    """A list whose values are of a kind."""
    return Kind(f"a list (each {kind.what})", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def by_name(kind: Kind) -> Kind:
    """An object whose values are of a kind."""
    return Kind(
        f"an object (each value {kind.what})",
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and -LARGEST <= value <= LARGEST


NULL = Kind("null", lambda value: value is None)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_number)
ABOVE_ZERO = Kind("a number above 0", lambda value: _is_number(value) and value >= 1 / LARGEST)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {str(first_repeated(key for key, _ in pairs))[:80]!r} is there twice")
    return found


def first_repeated(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time; None where all differ."""
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def is_nested_deeper(data: Any, maximum: int) -> bool:
    """True where lists and objects of a JSON value are nested deeper than `maximum`; computed without recursion."""
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(maximum):
        level = [child for node in level for child in _inside(node) if isinstance(child, dict | list)]
    return bool(level)


def _inside(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _walk(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value, with its dotted key."""
    yield key, data
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _walk(value, f"{key}.{name}" if key else name)
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from _walk(value, f"{key}[{number}]")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
