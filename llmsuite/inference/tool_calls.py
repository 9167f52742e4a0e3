"""Tool calls in answers. Their format is detected from the chat template, which renders the calls of earlier turns.

A template writes a call as a JSON object, with or without a marker in front of it:

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Qwen, Hermes, chatml
    {"name": "add", "parameters": {"a": 1}}                             Llama 3.1
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                 Mistral
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.data.call_forms import PROBE_ARGUMENTS, PROBE_ID, PROBE_KEY, PROBE_NAME, PROBE_TOOLS
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message, ToolCall

_JSON = json.JSONDecoder()
_MAX_TURN_CHARS = 1 << 14
"""Characters of the rendered probe, from its begin, in which a call is looked for: the time grows with their square."""


@dataclasses.dataclass(frozen=True)
class ToolCallFormat:
    """Format in which a model writes tool calls."""

    start_marker: str
    """Text in front of a call; empty where an answer is either text or calls."""
    end_marker: str
    """Text after a call; may be empty."""
    name_key: str
    arguments_key: str

    def parse(self, text: str, tools: Collection[str]) -> tuple[str, list[ToolCall]]:
        """Split an answer into its text and its tool calls. Anything but a complete call of one of the `tools` stays
        text."""
        calls: list[ToolCall] = []
        if not self.start_marker:
            found = _json_values(text)
            calls = [call for value in found if (call := self._call(value, tools)) is not None]
            if not calls or len(calls) < len(found):
                return text, []
            return "", calls
        parts = []
        done = 0
        while (at := text.find(self.start_marker, done)) >= 0:
            begin = _skip(text, at + len(self.start_marker))
            try:
                value, end = _JSON.raw_decode(text, begin)
            except (ValueError, RecursionError):
                break
            call = self._call(value, tools)
            if call is None:
                break
            parts.append(text[done:at])
            calls.append(call)
            done = end
            after = _skip(text, end)
            if self.end_marker and text.startswith(self.end_marker, after):
                done = after + len(self.end_marker)
        parts.append(text[done:])
        content = "".join(parts)
        if calls:
            content = content.strip()
        return content, calls

    def text_length(self, text: str) -> int:
        """Number of characters at the beginning of an incomplete answer that are text, whatever follows."""
        if not self.start_marker:
            begin = _skip(text, 0)
            may_be_call = begin == len(text) or text[begin] in "{["
            return 0 if may_be_call else len(text)
        if (at := text.find(self.start_marker)) >= 0:
            return at
        most = min(len(text), len(self.start_marker) - 1)
        return len(text) - next((n for n in range(most, 0, -1) if text.endswith(self.start_marker[:n])), 0)

    def _call(self, value: Any, tools: Collection[str]) -> ToolCall | None:
        name = value.get(self.name_key) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in tools:
            return None
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):
            arguments = next(iter(_json_values(arguments)), None)
        if not isinstance(arguments, dict):
            return None
        identifier = value.get("id")  # some models write one, and expect it in the tool's answer
        if not isinstance(identifier, str):
            identifier = None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False), identifier)


def detect_tool_call_format(template: ChatTemplate, control_tokens: Collection[str]) -> ToolCallFormat:
    """Detect the format of a chat template's tool calls.

    Args:
        template: of the model.
        control_tokens: of its tokenizer; they are left out of the text of answers.

    Raises:
        UserError: it renders no calls, or in an unknown format.
    """
    question = [Message("user", "Hi?")]
    call = Message("assistant", "", (ToolCall(PROBE_NAME, PROBE_ARGUMENTS, PROBE_ID),))
    try:
        prompt = template.render(question, add_generation_prompt=True, tools=PROBE_TOOLS)
        conversation = template.render([*question, call], tools=PROBE_TOOLS)
    except UserError as error:
        raise UserError(f"tools: {error}") from error
    turn = conversation[len(os.path.commonprefix([prompt, conversation])) :]
    for token in control_tokens:
        turn = turn.replace(token, " ")
    turn = turn[:_MAX_TURN_CHARS]
    for begin, end, value in _json_objects(turn):
        names = [key for key, what in value.items() if what == PROBE_NAME]
        arguments = [key for key, what in value.items() if isinstance(what, (dict, str)) and PROBE_KEY in what]
        if len(names) == len(arguments) == 1:
            before = turn[:begin].split()
            after = turn[end:].split()
            has_marker = bool(before) and any(char.isalnum() for char in before[-1])
            start_marker = before[-1] if has_marker else ""
            end_marker = after[0] if has_marker and after else ""
            return ToolCallFormat(start_marker, end_marker, names[0], arguments[0])
    raise UserError("tools: the model's chat template renders no calls, or not as JSON objects with a name")


def _json_objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield every JSON object in a text, nested ones too: begin, end, value."""
    for found in re.finditer("{", text):
        try:
            value, end = _JSON.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        yield found.start(), end, value


def _json_values(text: str) -> list[Any]:
    """The entries of a JSON list, or the single value of other JSON; empty if the text is no JSON."""
    try:
        value = _JSON.decode(text.strip())
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else [value]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
