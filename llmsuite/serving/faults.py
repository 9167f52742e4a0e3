"""Error messages for the body of a request, in terms of JSON: pydantic's messages name Python classes and types."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from llmsuite.base.redaction import json_type_name
from llmsuite.base.suggestions import final_suggestion

_MAX_FAULTS = 5
"""Most faults in the message for one request."""
_MAX_KEY_LENGTH = 64
"""Most characters of a key that is shown, and of one that is compared with known keys."""
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
_LENGTHS = {
    "string_too_short": ("characters", "at least", "min_length"),
    "string_too_long": ("characters", "at most", "max_length"),
    "too_short": ("entries", "at least", "min_length"),
    "too_long": ("entries", "at most", "max_length"),
}


def faults(model: type[BaseModel], error: ValidationError) -> str:
    """Format the faults of a request.

    For a key with values of several types, pydantic reports a fault for each type. The field of such a key has a
    description of all types, which replaces them in the message. At most `_MAX_FAULTS` faults are formatted, because a
    body may have very many.
    """
    messages: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        if len(messages) == _MAX_FAULTS:
            break
        key = str(detail["loc"][0]) if detail["loc"] else ""
        field = model.model_fields.get(key)
        if field is not None and field.description is not None and not _is_missing(detail, key):
            messages[f"{key}: has to be {field.description}"] = None
        else:
            is_own = detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1
            is_own = is_own and len(key) <= _MAX_KEY_LENGTH
            meant = ""
            if is_own:
                meant = final_suggestion(key, model.model_fields, cutoff=0.8, quotes=False)
            messages[f"{format_location(detail['loc'])}: {_describe(detail)}{meant}"] = None
    return "; ".join(messages)


def _is_missing(detail: Any, key: str) -> bool:
    """True where the key itself is missing, not a part of its value."""
    return detail["type"] == "missing" and detail["loc"] == (key,)


def format_location(loc: tuple[int | str, ...]) -> str:
    """Format the location of a fault, e.g. tools[0].function.name."""
    found = "".join(f"[{step}]" if isinstance(step, int) else f".{_shown(step)}" for step in loc if step != "[key]")
    return found.removeprefix(".") or "the body"


def _shown(key: str) -> str:
    return key if len(key) <= _MAX_KEY_LENGTH else f"{key[:_MAX_KEY_LENGTH]}…"


def _describe(detail: Any) -> str:
    kind = detail["type"]
    given = detail["input"]
    context = detail.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known here"
    if kind == "none_required" or context.get("max_length") == 0 or context.get("expected") == "''":
        return _UNSUPPORTED
    if kind in _KINDS:
        what = repr(given) if isinstance(given, float) else json_type_name(given)
        return f"has to be {_KINDS[kind]}, and is {what}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        limit = context[bound]
        return f"is {given}; it has to be {words} {f'{limit:g}' if isinstance(limit, float) else limit}"
    if kind == "literal_error":
        return f"has to be {context['expected'].replace('False', 'false')}"
    if kind in _LENGTHS:
        parts, words, bound = _LENGTHS[kind]
        return f"has {len(given)} {parts}; it has to have {words} {context[bound]}"
    if kind == "string_pattern_mismatch":
        return f"is {given[:100]!r}; it has to match {context['pattern']}"
    return str(detail["msg"]).removeprefix("Value error, ")
