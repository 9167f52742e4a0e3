"""Thoughts in answers: separates them from the content, while an answer is decoded.

A model that thinks writes `<think>`, its thoughts and `</think>` before its content. Its chat template may write the
first of these already, at the end of the prompt: the answer then begins with the thoughts.
"""

from __future__ import annotations

import re

from llmsuite.data.thoughts import THOUGHT_BEGIN, THOUGHT_END

_OPENED = re.compile(r"<think>\s*\Z")


def has_thoughts(template: str | None) -> bool:
    """Return True for a chat template of a model that writes its thoughts between `THOUGHT_BEGIN` and `THOUGHT_END`."""
    return template is not None and THOUGHT_END in template


def opens_thoughts(prompt: str) -> bool:
    """Return True if a prompt ends with `THOUGHT_BEGIN`, so that its answer begins with the thoughts."""
    return _OPENED.search(prompt) is not None


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
