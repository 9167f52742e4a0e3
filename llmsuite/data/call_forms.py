"""Forms of a turn with tool calls that a chat template accepts.

Rows have the arguments of a call as a JSON object or as text, and null or an empty text as the content of a turn that
only calls a tool. Templates are written for one of each: some write arguments with `tojson`, which quotes a text a
second time, others append them to a text, which fails for an object; some test for null. A turn keeps its form where
its template accepts it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

PROBE_NAME = "probe_name"
PROBE_KEY = "probe_key"
PROBE_VALUE = "probe_value"
PROBE_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": PROBE_NAME,
                "description": "A probe.",
                "parameters": {"type": "object", "properties": {PROBE_KEY: {"type": "string"}}},
            },
        }
    ]
)
PROBE_ID = "probe0001"
"""Id of the probe's call: nine letters and digits, as Mistral's templates require."""
PROBE_ARGUMENTS = json.dumps({PROBE_KEY: PROBE_VALUE})

_CONTENTS = {"null": None, "nothing": "", "text": "A probe."}
_Form = tuple[str, bool]
"""A key of `_CONTENTS`, and True for arguments as text."""
FORMS: tuple[_Form, ...] = tuple((content, as_text) for content in _CONTENTS for as_text in (False, True))


def probe(form: _Form) -> dict[str, Any]:
    """Return a turn of the assistant in a form."""
    content, as_text = form
    arguments = PROBE_ARGUMENTS if as_text else json.loads(PROBE_ARGUMENTS)
    call = {"id": PROBE_ID, "type": "function", "function": {"name": PROBE_NAME, "arguments": arguments}}
    return {"role": "assistant", "content": _CONTENTS[content], "tool_calls": [call]}


@dataclasses.dataclass(frozen=True)
class CallForms:
    """Forms that a template accepts."""

    accepted: frozenset[_Form]

    @classmethod
    def of(cls, rendered: Mapping[_Form, str | None]) -> CallForms:
        """Return the forms of a template by its texts for the probes; None stands for a probe that it refused."""
        return cls(frozenset(form for form, text in rendered.items() if text is not None and _is_accepted(form, text)))

    def fit(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a turn with calls in a form that the template accepts: its own, else the nearest.

        The turn is unchanged where the template accepts none, so that the error is the template's.
        """
        own = turn["content"]
        contents = [own]
        if not own:
            contents.append("" if own is None else None)
        for content in contents:
            name = _content_name(content)
            kinds = [as_text for as_text in (False, True) if (name, as_text) in self.accepted]
            if kinds:
                calls = [_convert_call(call, kinds) for call in turn["tool_calls"]]
                return {**turn, "content": content, "tool_calls": calls}
        return turn


def _content_name(content: str | None) -> str:
    """Key of `_CONTENTS` for the content of a turn."""
    if content is None:
        return "null"
    return "text" if content.strip() else "nothing"


def _convert_call(call: dict[str, Any], kinds: list[bool]) -> dict[str, Any]:
    """Return a call whose arguments are text (True) or an object (False), as `kinds` allows."""
    function = call["function"]
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    if is_text in kinds:
        return call
    arguments = json.loads(arguments or "{}") if is_text else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _is_accepted(form: _Form, text: str) -> bool:
    """Return True if a rendered turn has its call, neither quoted a second time nor as a Python literal."""
    content, as_text = form
    if any(word not in text for word in (PROBE_NAME, PROBE_KEY, PROBE_VALUE)):
        return False
    if content == "null" and "None" in text:
        return False
    faulty = f'\\"{PROBE_KEY}' if as_text else f"'{PROBE_KEY}'"
    return faulty not in text
