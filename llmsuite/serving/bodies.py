"""Bodies of requests: their size is checked before they are validated; large ones are read outside the event loop.

Validation creates a fault for every wrong value and for each type that the value may have. Three things together bound
the cost of a body: the bounds here; lists, whose validation stops at the first wrong entry (`protocol.FAIL_FAST`); and
`faults`, which formats only as many faults as it reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError

from llmsuite.inference.prompts import NO_TEXT
from llmsuite.serving.faults import faults, format_location

B = TypeVar("B", bound=BaseModel)
ModelOf = Callable[[Any], type[B]]
"""The pydantic model of a body, by its content."""
MAX_DEPTH = 64
"""Most levels of nested lists and objects."""
MAX_KEYS = 1024
"""Most keys of an object."""
MAX_ENTRIES = 16_384
"""Most entries of a list, unless the model's context is longer: a prompt may be a list of tokens."""
MAX_PARTS = 65_536
"""Most texts, lists and objects in a body, together; keys are texts. Numbers are bounded by the body's size."""
MAX_INLINE_BYTES = 16_384
"""Most bytes of a body that is read in the event loop: a thread would take longer than reading."""
_TEXT = re.compile(r'"(?:[^"\\]+|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A text in JSON. An unterminated one matches too, so that no character is scanned twice."""
_NO_PARTS = (int, float, bool, type(None))
_Loc = tuple[Any, Any] | None
"""Location of a value: that of the list or object that has it, and its index or key there."""


def validate_body(raw: bytes, model_of: ModelOf[B], max_context: int) -> B:
    """Parse and validate a body.

    Args:
        raw: JSON.
        model_of: the pydantic model, by the content.
        max_context: tokens of the longest prompt.

    Raises:
        HTTPException: 400, with the fault.
    """
    try:
        text = raw.decode(json.detect_encoding(raw))
        check_parts(text)
        content = json.loads(text)
        check_bounds(content, max(MAX_ENTRIES, max_context))
        model = model_of(content)
        try:
            return model.model_validate(content)
        except ValidationError as error:
            raise HTTPException(400, faults(model, error)) from None
    except UnicodeEncodeError:
        raise HTTPException(400, f"the body {NO_TEXT}") from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}"[:300]) from None


def check_parts(text: str) -> None:
    """Check the number of parts before any is created: each takes far more memory than it has characters.

    Raises:
        HTTPException: 400, there are more than `MAX_PARTS`.
    """
    if text.count("[") + text.count("{") + text.count('"') // 2 <= MAX_PARTS:
        return
    others, num_texts = _TEXT.subn("", text)  # texts may have brackets and quotes in them
    found = num_texts + others.count("[") + others.count("{")
    if found > MAX_PARTS:
        message = f"the body: has {found:,} texts, lists and objects; it has to have at most {MAX_PARTS:,}"
        raise HTTPException(400, message)


def check_bounds(content: Any, max_entries: int) -> None:
    """Check depth, keys and entries of a JSON value, level by level.

    Raises:
        HTTPException: 400, naming the value and the bound.
        UnicodeEncodeError: a text has half of a surrogate pair.
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
    raise HTTPException(400, f"{_format_location(level[0][1])}: {message}")


def _check_text(text: str) -> None:
    if not text.isascii():
        text.encode()


def _check_size(value: list[Any] | dict[str, Any], loc: _Loc, max_entries: int) -> None:
    what, most = ("entries", max_entries) if isinstance(value, list) else ("keys", MAX_KEYS)
    if len(value) > most:
        raise HTTPException(400, f"{_format_location(loc)}: has {len(value):,} {what}; it has to have at most {most:,}")


def _parts(value: list[Any] | dict[str, Any], loc: _Loc) -> Iterator[tuple[Any, _Loc]]:
    """The texts, lists and objects directly inside a list or an object."""
    if isinstance(value, dict):
        for key in value:
            _check_text(key)
        entries: Any = value.items()
    elif set(map(type, value)).issubset(_NO_PARTS):  # e.g. a prompt of token ids
        return
    else:
        entries = enumerate(value)
    for step, part in entries:
        if not isinstance(part, _NO_PARTS):
            yield part, (loc, step)


def _format_location(loc: _Loc) -> str:
    steps = []
    while loc is not None:
        loc, step = loc
        steps.append(step)
    return format_location(tuple(reversed(steps)))
