"""What is wrong with the body of a request, in the words of JSON: pydantic's name our classes and Python's types."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError

from llmsuite.shown import kind_of_json

_MOST = 5
"""Faults that are told of one request."""
_LONGEST = 64
"""Characters of a key that are shown, and of one that is compared with known ones."""
_UNSUPPORTED = "is not supported here; leave it out"
_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def faults(kind: type[BaseModel], error: ValidationError) -> str:
    """What is wrong with a request, by its keys.

    Where a key takes values of several types, pydantic tells what is wrong for each of them. Such a key has a
    description of all, which is told in their place. Only what is told is put into words.
    """
    told: dict[str, None] = {}
    for fault in error.errors(include_url=False):
        if len(told) == _MOST:
            break
        key = str(fault["loc"][0]) if fault["loc"] else ""
        field = kind.model_fields.get(key)
        if field is not None and field.description is not None and not _is_missing(fault, key):
            told[f"{key}: has to be {field.description}"] = None
        else:
            is_own = fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1
            is_own = is_own and len(key) <= _LONGEST
            near = difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.8) if is_own else []
            meant = f"; did you mean {near[0]}?" if near else ""
            told[f"{place(fault['loc'])}: {_words(fault)}{meant}"] = None
    return "; ".join(told)


def _is_missing(fault: Any, key: str) -> bool:
    """Whether the key itself is not there, and not a part of its value."""
    return fault["type"] == "missing" and fault["loc"] == (key,)


def place(loc: tuple[int | str, ...]) -> str:
    """Where a fault is, such as tools[0].function.name."""
    found = "".join(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in loc if step != "[key]")
    return found.removeprefix(".") or "the body"


def _shown(key: str) -> str:
    return key if len(key) <= _LONGEST else f"{key[:_LONGEST]}…"


def _words(fault: Any) -> str:
    kind, given, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known here"
    if kind == "none_required" or context.get("max_length") == 0 or context.get("expected") == "''":
        return _UNSUPPORTED
    if kind in _KINDS:
        what = repr(given) if isinstance(given, float) else kind_of_json(given)
        return f"has to be {_KINDS[kind]}, and is {what}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit = context[bound]
        return f"is {given}; it has to be {words} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind == "literal_error":
        return f"has to be {context['expected'].replace('False', 'false')}"
    if kind in ("string_too_short", "string_too_long"):
        words, bound = ("at least", "min_length") if kind == "string_too_short" else ("at most", "max_length")
        return f"has {len(given)} characters; it has to have {words} {context[bound]}"
    if kind in ("too_short", "too_long"):
        words, bound = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
        return f"has {len(given)} entries; it has to have {words} {context[bound]}"
    if kind == "string_pattern_mismatch":
        return f"is {given[:100]!r}; it has to match {context['pattern']}"
    return str(fault["msg"]).removeprefix("Value error, ")
