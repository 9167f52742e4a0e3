"""What values of another suite's file may be: one text, number or truth value, a list, or a mapping."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from llmsuite.errors import UserError

_ON: tuple[Any, ...] = (True, 1, "1", "true", "True", "yes", "Yes")
"""Values that say yes."""
_OFF: tuple[Any, ...] = (None, False, 0, "", "0", "false", "False", "no", "No", "none", "None", "null", [], {})
"""Values that say no."""


def is_on(value: Any) -> bool:
    """Whether a value says more than no."""
    return value not in _OFF


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a value may be. Where nothing is said it may be null too, but as an item of a list."""

    one: bool = True
    """Whether it may be one text, number or truth value."""
    items: Kind | None = None
    """The kind of its items, where it may be a list."""
    keys: Mapping[str, Kind] | None = None
    """The kinds of the keys that are read, where it may be a mapping; the others are as they are."""
    others: Kind | None = None
    """The kind of all other keys of a mapping, where they are read too."""

    def __str__(self) -> str:
        found = ["one text, number or truth value"] if self.one else []
        found += ["a list [a, b]"] if self.items is not None else []
        found += ["a mapping {key: value}"] if self.keys is not None else []
        return " or ".join(found)


ONE = Kind()
WORDS = Kind(items=ONE)
"""One value, or several."""
LIST = Kind(one=False, items=ONE)
MAPPING = Kind(one=False, keys={}, others=ONE)
ONE_OR_MAPPING = Kind(keys={})


def check(value: Any, kind: Kind, where: str) -> None:
    """Raise UserError for a value, or a part of one, that is of another kind.

    Args:
        value: as it is in the file.
        kind: what it may be.
        where: the file and the key, for the message.
    """
    if isinstance(value, list) and kind.items is not None:
        for at, item in enumerate(value):
            if item is None:
                raise wrong(item, str(kind.items), f"{where}[{at}]")
            check(item, kind.items, f"{where}[{at}]")
    elif isinstance(value, Mapping) and kind.keys is not None:
        for key, part in value.items():
            if (known := kind.keys.get(key, kind.others)) is not None:
                check(part, known, f"{where}.{key}")
    elif value is not None and not (kind.one and isinstance(value, (str, int, float))):
        raise wrong(value, str(kind), where)


def number(value: Any, where: str) -> Any:
    """A number as it is. Raises UserError for what is none, or none that can be computed with."""
    # a whole number in a file may be beyond all floats
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise wrong(value, "a number", where)
    return value


def wrong(value: Any, wanted: str, where: str) -> UserError:
    """The error of a value at a place that is not what is wanted there."""
    shown = repr(value)
    return UserError(f"{where} is {shown if len(shown) <= 80 else f'{shown[:80]} …'}; {wanted} is wanted")


def is_true(value: Any) -> bool:
    """Whether a flag is set, in any of the ways it is written."""
    return value in _ON
