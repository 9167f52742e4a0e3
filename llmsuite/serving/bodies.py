"""Bodies of requests: bounded before they are validated, and read beside the loop that answers everybody.

Validation makes a fault of every wrong value, for each type that the value may have. So what a body costs is bounded
by three things together: the bounds here; lists of requests, which are left at their first wrong entry
(`protocol.FIRST_FAULT`); and `faults`, which words no more faults than it tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError

from llmsuite.inference.prompts import NO_TEXT
from llmsuite.serving.faults import faults, place

B = TypeVar("B", bound=BaseModel)
Kinds = Callable[[Any], type[B]]
"""The model of a body, by its content."""
MAX_DEPTH = 64
"""Lists and objects inside of each other."""
MAX_KEYS = 1024
"""Keys of an object."""
MAX_ENTRIES = 16_384
"""Entries of a list, unless the model's context is longer: a prompt may be a list of tokens."""
MAX_PARTS = 65_536
"""Texts, lists and objects in a body, together; keys are texts. Numbers are bounded by the size of a body alone."""
AT_ONCE = 16_384
"""Bytes of a body that is read at once: handing it to a thread would take longer."""
_TEXT = re.compile(r'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A text in JSON. One that does not end is one too: so none is looked at twice."""
_NO_PARTS = (int, float, bool, type(None))
_Loc = tuple[Any, Any] | None
"""Where a value is: where the list or object is that has it, and its number or key there."""


def validated(raw: bytes, kinds: Kinds[B], max_context: int) -> B:
    """The content of a body, validated.

    Args:
        raw: JSON; of more than `AT_ONCE` bytes it is read beside the loop.
        kinds: the model to validate with.
        max_context: tokens of the longest prompt.

    Raises:
        HTTPException: 400, saying what is wrong.
    """
    try:
        written = raw.decode(json.detect_encoding(raw))
        check_parts(written)
        content = json.loads(written)
        check_bounds(content, max(MAX_ENTRIES, max_context))
        kind = kinds(content)
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            raise HTTPException(400, faults(kind, error)) from None
    except UnicodeEncodeError:
        raise HTTPException(400, f"the body {NO_TEXT}") from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}"[:300]) from None


def check_parts(written: str) -> None:
    """The bound of parts, looked at before any is made: each takes far more room than it has characters.

    Raises:
        HTTPException: 400, there are more than `MAX_PARTS`.
    """
    if written.count("[") + written.count("{") + written.count('"') // 2 <= MAX_PARTS:
        return
    others, num_texts = _TEXT.subn("", written)  # brackets and quotes may stand in texts
    found = num_texts + others.count("[") + others.count("{")
    if found > MAX_PARTS:
        message = f"the body: has {found:,} texts, lists and objects; it has to have at most {MAX_PARTS:,}"
        raise HTTPException(400, message)


def check_bounds(content: Any, max_entries: int) -> None:
    """The bounds of depth, keys and entries, one level of a value of JSON after the other.

    Raises:
        HTTPException: 400, naming what is too large and the bound.
        UnicodeEncodeError: a text has half of a surrogate pair, which is no text.
    """
    level: list[tuple[Any, _Loc]] = [(content, None)]
    for _ in range(MAX_DEPTH + 1):
        below: list[tuple[Any, _Loc]] = []
        for value, loc in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, (list, dict)):
                _check_size(value, loc, max_entries)
                below += _parts(value, loc)
        if not below:
            return
        level = below
    message = f"is more than {MAX_DEPTH} lists or objects deep; send a body with fewer levels"
    raise HTTPException(400, f"{_place(level[0][1])}: {message}")


def _check_text(text: str) -> None:
    if not text.isascii():
        text.encode()


def _check_size(value: list[Any] | dict[str, Any], loc: _Loc, max_entries: int) -> None:
    what, most = ("entries", max_entries) if isinstance(value, list) else ("keys", MAX_KEYS)
    if len(value) > most:
        raise HTTPException(400, f"{_place(loc)}: has {len(value):,} {what}; it has to have at most {most:,}")


def _parts(value: list[Any] | dict[str, Any], loc: _Loc) -> Iterator[tuple[Any, _Loc]]:
    """The texts, lists and objects right in a list or an object."""
    if isinstance(value, dict):
        for key in value:
            _check_text(key)
        entries: Any = value.items()
    elif set(map(type, value)).issubset(_NO_PARTS):  # such as a prompt of ids
        return
    else:
        entries = enumerate(value)
    for step, part in entries:
        if not isinstance(part, _NO_PARTS):
            yield part, (loc, step)


def _place(loc: _Loc) -> str:
    steps = []
    while loc is not None:
        loc, step = loc
        steps.append(step)
    return place(tuple(reversed(steps)))
