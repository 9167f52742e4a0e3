"""Thoughts of a model in a rendered conversation: where they are, and what a template does with those of earlier turns.

A template writes the thoughts of a turn before its content, such as in `<think>` and `</think>`. Its generation prompt
may open them already, or open and close them for a model that is not to think. Of earlier turns it may leave them out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re

from llmsuite.data.rows import REASONING, Message

THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"
"""Marks that most models write around their thoughts."""
THINK_BLOCK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
"""Content of a turn that begins with the thoughts of the model."""
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""End of a generation prompt that opens the thoughts, or opens and closes them."""
_END_MARKER = re.compile(r"<[|\uff5c][^<>|\uff5c]+[|\uff5c]>")
"""A marker that ends a turn, such as `<|end|>`."""


def thoughts_of(message: Message) -> str:
    """Return the thoughts of a turn, which stand in a key of their own or in its content; "" for none."""
    if message.reasoning.strip():
        return message.reasoning.strip()
    found = THINK_BLOCK.fullmatch(message.content)
    return "" if found is None else found[1].strip()


def without_thoughts(message: Message) -> Message:
    """Return a turn without its thoughts, wherever they stand."""
    turn = {key: value for key, value in message.as_turn().items() if key not in REASONING}
    content = visible_content(message)
    if isinstance(turn.get("content"), str):
        turn["content"] = content
    raw = json.dumps(turn, ensure_ascii=False) if message.raw else ""
    return dataclasses.replace(message, content=content, reasoning="", raw=raw)


def visible_content(message: Message) -> str:
    """Return the content of a turn without thoughts."""
    found = None if message.reasoning.strip() else THINK_BLOCK.fullmatch(message.content)
    return message.content.strip() if found is None else found[2].strip()


def shared_prompt(prompt: str, text: str) -> str | None:
    """Return the beginning of a conversation, rendered as `text`, that a generation prompt shares with it.

    This is the prompt, or the prompt without the end that opens thoughts; None if the conversation begins differently.
    """
    if text.startswith(prompt):
        return prompt
    found = _OPENED.search(prompt)
    if found is not None and text.startswith(prompt[: found.start()]):
        return prompt[: found.start()]
    return None


def thought_place(message: Message, turn: str) -> slice:
    """Return the part of a turn, rendered as `turn`, that has its thoughts if the template has rendered them: up to
    `</think>`, or before the content. The content, or a call, may have the same words."""
    opened = turn.find(THOUGHT_BEGIN)
    begin = opened + len(THOUGHT_BEGIN) if opened >= 0 else 0
    end = turn.find(THOUGHT_END, begin)
    if end < 0:
        anchor = _anchor(message)
        end = turn.rfind(anchor) if anchor else -1
    return slice(begin, end if end >= 0 else len(turn))


def thought_span(message: Message, turn: str) -> tuple[int, int] | None:
    """Return begin and end of the thoughts of a turn that is rendered as `turn`; None where it has none."""
    thoughts = thoughts_of(message)
    place = thought_place(message, turn)
    begin = turn.find(thoughts, place.start, place.stop) if thoughts else -1
    return None if begin < 0 else (begin, begin + len(thoughts))


def _anchor(message: Message) -> str:
    """Return what a template writes after the thoughts of a turn: its content, or the name of its first call."""
    content = visible_content(message)
    if not content and message.tool_calls:
        return message.tool_calls[0].name
    return content


def earlier_turn_length(message: Message, last: str, text: str) -> int | None:
    """Return the length of a turn that a template renders differently once others follow.

    Args:
        message: the turn.
        last: the turn as it is rendered at the end of a conversation.
        text: a conversation from the begin of the turn on, with other turns after it.

    Returns:
        Number of characters of `text`; None if more than the thoughts is different.
    """
    anchor = _anchor(message)
    at_last = last.rfind(anchor) if anchor else -1
    if at_last < 0:
        return None
    head = _squeezed(last[:at_last]).replace(_squeezed(thoughts_of(message)), "", 1)
    tail = last[at_last:]
    at = text.find(anchor)
    while at >= 0:
        if not head.endswith(_squeezed(text[:at])):
            return None
        if text.startswith(tail, at):
            return at + len(tail)
        # the last turn of all may end with another marker than the others
        end = at + len(anchor)
        marker = _END_MARKER.match(text, end)
        if marker is not None and _END_MARKER.fullmatch(tail[len(anchor) :]):
            return marker.end()
        at = text.find(anchor, at + 1)
    return None


def _squeezed(text: str) -> str:
    return "".join(text.split())


class RenderedText:
    """A rendered conversation, in which the contents of many turns are looked for."""

    def __init__(self, text: str):
        """Take the text."""
        self._text = text

    @functools.cached_property
    def _squeezed(self) -> str:
        return "".join(self._text.split())

    def contains(self, content: str) -> bool:
        """Return True if the text has the content of a turn. Templates may set white space as they like."""
        return content.strip() in self._text or "".join(content.split()) in self._squeezed


def contains(text: str, content: str) -> bool:
    """Return True if a text has the content of a turn, as in `RenderedText`."""
    return RenderedText(text).contains(content)
