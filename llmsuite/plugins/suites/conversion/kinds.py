"""Kinds of values in files of other suites: a single value, a list, or a mapping."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError

_ON: tuple[Any, ...] = (True, 1, "1", "true", "True", "yes", "Yes")
"""Values that mean true."""
_OFF: tuple[Any, ...] = (None, False, 0, "", "0", "false", "False", "no", "No", "none", "None", "null", [], {})
"""Values that mean false, or not given."""


def is_on(value: Any) -> bool:
    """Return True unless a value means false, or not given."""
    return value not in _OFF


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of value. null is always allowed, except as an item of a list."""

    one: bool = True
    """True if the value may be a single text, number or boolean."""
    items: Kind | None = None
    """Kind of the items, if the value may be a list."""
    keys: Mapping[str, Kind] | None = None
    """Kinds of the keys that are read, if the value may be a mapping; other keys are not checked."""
    others: Kind | None = None
    """Kind of all other keys of a mapping, if they are read too."""

    def __str__(self) -> str:
        found = []
        if self.one:
            found = ["a single text, number or boolean"]
        if self.items is not None:
            found.append("a list [a, b]")
        if self.keys is not None:
            found.append("a mapping {key: value}")
        return " or ".join(found)


ONE = Kind()
WORDS = Kind(items=ONE)
"""One value, or several."""
LIST = Kind(one=False, items=ONE)
MAPPING = Kind(one=False, keys={}, others=ONE)
ONE_OR_MAPPING = Kind(keys={})


def check(value: Any, kind: Kind, where: str) -> None:
    """Raise UserError for a value, or a part of it, of another kind.

    Args:
        value: value in the file.
        kind: expected kind.
        where: file and key, for the message.
    """
    if isinstance(value, list) and kind.items is not None:
        for at, item in enumerate(value):
            if item is None:
                raise wrong(item, str(kind.items), f"{where}[{at}]")
            check(item, kind.items, f"{where}[{at}]")
    elif isinstance(value, Mapping) and kind.keys is not None:
        for key, part in value.items():
            known = kind.keys.get(key, kind.others)
            if known is not None:
                check(part, known, f"{where}.{key}")
    elif value is not None and not (kind.one and isinstance(value, (str, int, float))):
        raise wrong(value, str(kind), where)


def number(value: Any, where: str) -> Any:
    """Return a number unchanged. Raises UserError for another type, infinity, NaN, or an integer beyond float64."""
    # an integer in a file may exceed the range of floats
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise wrong(value, "a number", where)
    return value


def wrong(value: Any, expected: str, where: str) -> UserError:
    """Return the error for a value of another kind than expected."""
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:80]} …"
    return UserError(f"{where} is {shown}; expected {expected}")


def is_true(value: Any) -> bool:
    """Return True if a value means true, in any notation."""
    return value in _ON
