"""Rows of data, independent of the format of their file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function the assistant asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """Who says it, of several with one role, or the function that a tool's answer is of; many templates show none."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The turns of a conversation, and which of the assistant's are supervised."""

    messages: tuple[Message, ...]
    supervised: tuple[bool, ...]
    """For each message, whether it is trained on; true for the assistant's only."""
    tools: str = ""
    """The tools that the assistant may call: a JSON list of function descriptions, as text. Empty for none."""


@dataclasses.dataclass(frozen=True)
class Preference:
    """A conversation that ends with the user, a better and a worse answer to it."""

    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """A conversation that ends with the user, and one answer to it that is wanted or not."""

    prompt: tuple[Message, ...]
    completion: str
    desirable: bool


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to answer: it ends with a turn of the user or of a tool."""

    messages: tuple[Message, ...]
    tools: str = ""
    """As in `Conversation`."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """The other columns of the row, for rewards. Where the row has an answer to the prompt, which is left out of
    `messages`, it is the column "answer", unless there is another one of this name."""


TYPES: Mapping[str, type] = {
    "conversation": Conversation,
    "preference": Preference,
    "unpaired": Unpaired,
    "prompt": Prompt,
}
"""What a row is, by the kind of rows that a stage of llmsuite reads."""


def turns_of(row: Any) -> list[tuple[str, str]]:
    """The role of each turn of a row, and what it says; nothing for rows of other kinds than those of this module."""
    if isinstance(row, (Conversation, Prompt)):
        return [(message.role, message.content) for message in row.messages]
    if not isinstance(row, (Preference, Unpaired)):
        return []
    answers = [row.chosen, row.rejected] if isinstance(row, Preference) else [row.completion]
    prompt = [(message.role, message.content) for message in row.prompt]
    return prompt + [("assistant", answer) for answer in answers]
