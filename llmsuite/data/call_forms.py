"""The forms in which a chat template takes turns that call tools.

Rows have the arguments of a call as a JSON object or as text, and null or an empty text where nothing is said beside
it. Templates are written for one of each: some write arguments by `tojson`, which quotes a text again, others append
them to a text, which fails for an object; some look for null. A turn keeps its form where its template takes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

PROBE_NAME, PROBE_KEY, PROBE_VALUE = "probe_name", "probe_key", "probe_value"
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
"""Nine letters and digits, as Mistral's templates ask for."""
PROBE_ARGUMENTS = json.dumps({PROBE_KEY: PROBE_VALUE})

_SAID = {"null": None, "nothing": "", "text": "A probe."}
_Form = tuple[str, bool]
"""A key of `_SAID`, and whether arguments are text."""
FORMS: tuple[_Form, ...] = tuple((said, as_text) for said in _SAID for as_text in (False, True))


def probe(form: _Form) -> dict[str, Any]:
    """A turn of the assistant in a form."""
    said, as_text = form
    arguments = PROBE_ARGUMENTS if as_text else json.loads(PROBE_ARGUMENTS)
    call = {"id": PROBE_ID, "type": "function", "function": {"name": PROBE_NAME, "arguments": arguments}}
    return {"role": "assistant", "content": _SAID[said], "tool_calls": [call]}


@dataclasses.dataclass(frozen=True)
class CallForms:
    """The forms that a template takes."""

    taken: frozenset[_Form]

    @classmethod
    def of(cls, rendered: Mapping[_Form, str | None]) -> CallForms:
        """Those of a template that has rendered the probes so; None where it refuses one."""
        return cls(frozenset(form for form, text in rendered.items() if text is not None and _is_taken(form, text)))

    def fit(self, turn: dict[str, Any]) -> dict[str, Any]:
        """A turn with calls in a form that the template takes: its own, or else the nearest. Its own too where the
        template takes none, so that the template can say why."""
        said = turn["content"]
        for content in [said] if said else [said, "" if said is None else None]:
            name = "null" if content is None else "text" if content.strip() else "nothing"
            kinds = [as_text for as_text in (False, True) if (name, as_text) in self.taken]
            if kinds:
                return {**turn, "content": content, "tool_calls": [_fitted(call, kinds) for call in turn["tool_calls"]]}
        return turn


def _fitted(call: dict[str, Any], kinds: list[bool]) -> dict[str, Any]:
    """A call whose arguments are of one of the kinds: text or not."""
    function = call["function"]
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    if is_text in kinds:
        return call
    arguments = json.loads(arguments or "{}") if is_text else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _is_taken(form: _Form, text: str) -> bool:
    """Whether a turn that was rendered has its call, written neither twice over nor as Python writes it."""
    said, as_text = form
    if any(word not in text for word in (PROBE_NAME, PROBE_KEY, PROBE_VALUE)):
        return False
    if said == "null" and "None" in text:
        return False
    return f'\\"{PROBE_KEY}' not in text if as_text else f"'{PROBE_KEY}'" not in text
