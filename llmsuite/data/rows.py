"""Rows of data, independent of the format of their file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn with what the model thought before it said something, as chat templates call them."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function the assistant asks for."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """By which a tool's answer names the call; None where the model wrote none."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation: what the suite reads of it, and the turn itself."""

    role: str
    content: str
    """Empty where a turn says nothing, such as one that only calls a tool."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What the model thought before, where that is not a part of the content."""
    given: str = ""
    """The turn as its row has it, as a JSON object in the form of OpenAI's API. Empty for a turn that is made of the
    fields above."""

    def as_turn(self) -> dict[str, Any]:
        """The turn as a chat template takes it, with all the keys that its row has."""
        if self.given:
            turn: dict[str, Any] = json.loads(self.given)
            return turn
        turn = {"role": self.role, "content": self.content}
        if self.reasoning:
            turn[REASONING[0]] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [_as_plain(call) for call in self.tool_calls]
        return turn

    @property
    def is_empty(self) -> bool:
        """Whether it neither says anything nor calls a tool."""
        return not self.content.strip() and not self.tool_calls


def _as_plain(call: ToolCall) -> dict[str, Any]:
    plain = {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
    return plain if call.id is None else {"id": call.id, **plain}


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
    chosen: Message
    rejected: Message
    tools: str = ""
    """As in `Conversation`."""


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """A conversation that ends with the user, and one answer to it that is wanted or not."""

    prompt: tuple[Message, ...]
    completion: Message
    desirable: bool
    tools: str = ""
    """As in `Conversation`."""


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


def answered(prompt: Sequence[Message], answer: Message, tools: str = "") -> Conversation:
    """A prompt with its answer, which alone is supervised."""
    return Conversation((*prompt, answer), (*[False] * len(prompt), True), tools)


def conversations_of(row: Any) -> list[Conversation]:
    """The conversations of a row: one for each of its answers. Empty for rows of other kinds than those of this
    module."""
    if isinstance(row, Conversation):
        return [row]
    if isinstance(row, Prompt):
        return [Conversation(row.messages, (False,) * len(row.messages), row.tools)]
    if isinstance(row, Preference):
        return [answered(row.prompt, answer, row.tools) for answer in (row.chosen, row.rejected)]
    if isinstance(row, Unpaired):
        return [answered(row.prompt, row.completion, row.tools)]
    return []


def turns_of(row: Any) -> list[tuple[str, str]]:
    """All texts of a row that its author wrote, each with the role of its turn: contents, thoughts, names and calls,
    and of the tools as if a user said them. Nothing for rows of other kinds than those of this module."""
    found: dict[tuple[str, str], None] = {}
    for conversation in conversations_of(row):
        for message in conversation.messages:
            said = [value for key, value in message.as_turn().items() if key != "role"]
            found.update(dict.fromkeys((message.role, text) for text in strings_in(said)))
        if conversation.tools:
            found.update(dict.fromkeys(("user", text) for text in strings_in(json.loads(conversation.tools))))
    return list(found)


def strings_in(value: Any) -> Iterator[str]:
    """The strings of a JSON value, keys of objects among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)
