"""What a row of data is once its file format no longer matters."""

from __future__ import annotations

import dataclasses
from typing import Literal

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


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Turns, of which some of the assistant's are learnt."""

    messages: tuple[Message, ...]
    learnt: tuple[bool, ...]
    """For each message; true for the assistant's only."""
    tools: str = ""
    """What the assistant may call: a JSON list of function descriptions, as text. Empty for none."""


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
    """A conversation that ends with the user, or with what a tool has said: something to answer."""

    messages: tuple[Message, ...]
    tools: str = ""
    """As in `Conversation`."""
