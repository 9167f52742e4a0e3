"""Calls of tools in what a model says. Their form is learnt from its chat template, which renders those of other turns.

A template writes a call as a JSON object, with or without a mark in front of it:

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

from llmsuite.data.call_forms import PROBE_ARGUMENTS, PROBE_ID, PROBE_KEY, PROBE_NAME, PROBE_TOOLS
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.rows import Message, ToolCall
from llmsuite.errors import UserError

_JSON = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class CallFormat:
    """How calls are written."""

    mark: str
    """Stands in front of a call; empty where an answer is either text or calls."""
    end: str
    """Stands behind it; may be empty."""
    name_key: str
    arguments_key: str

    def parse(self, text: str, known: Collection[str]) -> tuple[str, list[ToolCall]]:
        """What an answer says, and the tools it calls. What is no whole call of a known tool stays text."""
        calls: list[ToolCall] = []
        if not self.mark:
            found = _whole(text)
            calls = [call for value in found if (call := self._call(value, known)) is not None]
            return ("", calls) if calls and len(calls) == len(found) else (text, [])
        parts, done = [], 0
        while (at := text.find(self.mark, done)) >= 0:
            begin = _skip(text, at + len(self.mark))
            try:
                value, end = _JSON.raw_decode(text, begin)
            except (ValueError, RecursionError):
                break
            call = self._call(value, known)
            if call is None:
                break
            parts.append(text[done:at])
            calls.append(call)
            done, behind = end, _skip(text, end)
            if self.end and text.startswith(self.end, behind):
                done = behind + len(self.end)
        parts.append(text[done:])
        said = "".join(parts)
        return (said.strip() if calls else said), calls

    def free(self, text: str) -> int:
        """How many characters at the beginning of an answer are text, whatever follows."""
        if not self.mark:
            begin = _skip(text, 0)
            return 0 if begin == len(text) or text[begin] in "{[" else len(text)
        if (at := text.find(self.mark)) >= 0:
            return at
        most = min(len(text), len(self.mark) - 1)
        return len(text) - next((n for n in range(most, 0, -1) if text.endswith(self.mark[:n])), 0)

    def _call(self, value: Any, known: Collection[str]) -> ToolCall | None:
        name = value.get(self.name_key) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in known:
            return None
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):
            arguments = next(iter(_whole(arguments)), None)
        if not isinstance(arguments, dict):
            return None
        identifier = value.get("id")  # some models write one, and expect it in the tool's answer
        return ToolCall(
            name, json.dumps(arguments, ensure_ascii=False), identifier if isinstance(identifier, str) else None
        )


def call_format(template: ChatTemplate, control_tokens: Collection[str]) -> CallFormat:
    """The form of a template's calls.

    Args:
        template: of the model.
        control_tokens: of its tokenizer, which are no text where answers are read.

    Raises:
        UserError: it renders no calls, or in a form that is not known here.
    """
    asked = [Message("user", "Hi?")]
    call = Message("assistant", "", (ToolCall(PROBE_NAME, PROBE_ARGUMENTS, PROBE_ID),))
    try:
        before = template.render(asked, add_generation_prompt=True, tools=PROBE_TOOLS)
        whole = template.render([*asked, call], tools=PROBE_TOOLS)
    except UserError as error:
        raise UserError(f"tools: {error}") from error
    turn = whole[len(os.path.commonprefix([before, whole])) :]
    for token in control_tokens:
        turn = turn.replace(token, " ")
    for begin, end, value in _objects(turn):
        names = [key for key, what in value.items() if what == PROBE_NAME]
        arguments = [key for key, what in value.items() if PROBE_KEY in (what if isinstance(what, (dict, str)) else ())]
        if len(names) == len(arguments) == 1:
            mark, behind = turn[:begin].split(), turn[end:].split()
            is_word = bool(mark) and any(char.isalnum() for char in mark[-1])
            return CallFormat(
                mark[-1] if is_word else "", behind[0] if is_word and behind else "", names[0], arguments[0]
            )
    raise UserError("tools: the model's chat template renders no calls, or not as JSON objects with a name")


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Every JSON object in a text, also within another: begin, end, value."""
    for found in re.finditer("{", text):
        try:
            value, end = _JSON.raw_decode(text, found.start())
        except ValueError:
            continue
        yield found.start(), end, value


def _whole(text: str) -> list[Any]:
    """The values of a text that is a JSON list, or the one of any other JSON; none if it is no JSON."""
    try:
        value = _JSON.decode(text.strip())
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else [value]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
