"""Whether a rendered conversation has what a turn says."""

from __future__ import annotations

import re

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
"""What a turn says that begins with what the model thought."""
_MOST_OPENED = 64
"""Characters of a turn that a prompt of generation may have written ahead, such as `<think>`."""


def has_said(text: str, said: str) -> bool:
    """Whether a text has what somebody says in it. Templates may set white space as they like."""
    return said.strip() in text or "".join(said.split()) in "".join(text.split())


def says(said: str, before: str, text: str) -> bool:
    """Whether a turn that is rendered as `text` behind `before` says all of something.

    The prompt of generation may have written its beginning already, such as `<think>`; and a template that knows
    thoughts may write them in a form of its own.
    """
    if has_said(text, said):
        return True
    squeezed, turn = "".join(said.split()), "".join(text.split())
    opened = "".join(before[-4 * _MOST_OPENED :].split())
    for length in range(1, min(len(squeezed), _MOST_OPENED) + 1):
        if opened.endswith(squeezed[:length]) and turn.startswith(squeezed[length:]):
            return True
    parts = _THOUGHT.fullmatch(said)
    return parts is not None and all(has_said(text, part) for part in parts.groups())
