"""Thoughts in answers: separates them from the content, while an answer is decoded.

A model that thinks writes `<think>`, its thoughts and `</think>` before its content. Its chat template may write the
first of these already, at the end of the prompt: the answer then begins with the thoughts. Models such as gpt-oss write
messages in channels instead, whose names are between special tokens: thoughts are those of the channel "analysis".
"""

from __future__ import annotations

import re
from typing import Protocol

from llmsuite.data.thoughts import THOUGHT_BEGIN, THOUGHT_END

_OPENED = re.compile(r"<think>\s*\Z")
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|start|call|return|channel)\|>")
"""Tokens that end the text of a message."""
CHANNEL_TOKENS = ("<|start|>", _CHANNEL, "<|constrain|>", _MESSAGE, "<|end|>", "<|call|>", "<|return|>")
_THOUGHTS_CHANNEL = "analysis"
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class AnswerReader(Protocol):
    """Reads the text of an answer piece by piece."""

    def push(self, text: str, has_ended: bool) -> tuple[str, str]:
        """Return the thoughts and the content that are certain by now."""


def has_thoughts(template: str | None) -> bool:
    """Return True for a chat template of a model that writes its thoughts between `THOUGHT_BEGIN` and `THOUGHT_END`."""
    return template is not None and THOUGHT_END in template


def opens_thoughts(prompt: str) -> bool:
    """Return True if a prompt ends with `THOUGHT_BEGIN`, so that its answer begins with the thoughts."""
    return _OPENED.search(prompt) is not None


def has_channels(template: str | None) -> bool:
    """Return True for a chat template of a model that writes messages in channels."""
    return template is not None and _CHANNEL in template and _MESSAGE in template


class ChannelReader:
    """Reads the text of an answer in channels, with its special tokens, piece by piece.

    Each message is a header with the name of its channel, `<|message|>`, and a text. The prompt has begun the first
    header. An answer without any `<|message|>` is content.
    """

    def __init__(self) -> None:
        self._is_header = True
        self._is_thought = False
        self._has_message = False
        self._has_thoughts = False
        self._is_new = True
        """True until a message has text."""
        self._held = ""

    def push(self, text: str, has_ended: bool) -> tuple[str, str]:
        """Return the thoughts and the content that are certain by now.

        Args:
            text: the next piece of the answer.
            has_ended: True for the last piece.
        """
        self._held += text
        thoughts = ""
        content = ""
        while self._held:
            if self._is_header:
                header, mark, rest = self._held.partition(_MESSAGE)
                if not mark:
                    break
                self._begin(header)
                self._held = rest
                continue
            found = _ENDS.search(self._held)
            if found is not None:
                length = found.start()
            elif has_ended:
                length = len(self._held)
            else:
                length = len(self._held) - _overlap(self._held)
            body = self._held[:length]
            if self._is_thought:
                if body and self._has_thoughts and not thoughts.endswith("\n") and self._is_new:
                    thoughts += "\n"
                self._is_new &= not body
                self._has_thoughts |= bool(body)
                thoughts += body
            else:
                content += body
            self._held = self._held[length:]
            self._is_header = found is not None
            if found is None:
                break
        if has_ended and not self._has_message:
            content = _without_tokens(self._held)
        return thoughts, content

    def _begin(self, header: str) -> None:
        """Begin the text of the message with a header."""
        name = _CHANNEL_NAME.search(header)
        self._is_thought = name is not None and name[1] == _THOUGHTS_CHANNEL
        self._is_new = True
        self._is_header = False
        self._has_message = True


def _overlap(text: str) -> int:
    """Number of characters at the end of a text that may be the beginning of one of `CHANNEL_TOKENS`."""
    at = text.rfind("<")
    is_begun = at >= 0 and any(token.startswith(text[at:]) for token in CHANNEL_TOKENS)
    return len(text) - at if is_begun else 0


def _without_tokens(text: str) -> str:
    for token in CHANNEL_TOKENS:
        text = text.replace(token, "")
    return text


class ThoughtReader:
    """Reads the text of an answer piece by piece. White space around the thoughts is left out."""

    def __init__(self, is_opened: bool):
        """`is_opened`: the prompt has opened the thoughts, see `opens_thoughts`."""
        self._state = "thoughts" if is_opened else "start"
        self._is_first = True
        self._held = ""
        """Text that may be a part of a mark, or white space next to one."""

    def push(self, text: str, has_ended: bool) -> tuple[str, str]:
        """Return the thoughts and the content that are certain by now.

        Args:
            text: the next piece of the answer.
            has_ended: True for the last piece.
        """
        self._held += text
        thoughts = ""
        if self._state == "start":
            self._start(has_ended)
        if self._state == "thoughts":
            thoughts = self._thoughts(has_ended)
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "content"
        if self._state != "content":
            return thoughts, ""
        content = self._held
        self._held = ""
        return thoughts, content

    def _start(self, has_ended: bool) -> None:
        """Decide whether the answer begins with `THOUGHT_BEGIN`."""
        begun = self._held.lstrip()
        if begun.startswith(THOUGHT_BEGIN):
            self._held = begun.removeprefix(THOUGHT_BEGIN)
            self._state = "thoughts"
        elif has_ended or not THOUGHT_BEGIN.startswith(begun):
            self._state = "content"

    def _thoughts(self, has_ended: bool) -> str:
        """Return the thoughts that are certain. A model may repeat the mark that its prompt has written."""
        if self._is_first:
            begun = self._held.lstrip()
            if THOUGHT_BEGIN.startswith(begun) and not has_ended:
                return ""
            self._held = begun.removeprefix(THOUGHT_BEGIN).lstrip()
            self._is_first = not self._held
        found, mark, rest = self._held.partition(THOUGHT_END)
        if mark:
            self._held = rest
            self._state = "gap"
            return found.rstrip()
        if has_ended:
            self._held = ""
            return found.rstrip()
        length = len(found)
        for size in range(min(len(THOUGHT_END) - 1, length), 0, -1):
            if found.endswith(THOUGHT_END[:size]):
                length -= size
                break
        length = len(found[:length].rstrip())
        self._held = found[length:]
        return found[:length]
