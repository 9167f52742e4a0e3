"""Rows of data, independent of the format of their file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "tool")


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn with the model's thoughts before its content, as chat templates name them."""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function by the assistant."""

    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    """Id by which a tool's answer refers to the call; None if the model wrote none."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str
    """Text of the turn; empty for a turn that only calls a tool."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """Thoughts of the model before the content, where they are not a part of it."""
    raw: str = ""
    """JSON object with all keys of the turn in its row, in the form of OpenAI's API. Empty for a turn that the fields
    above describe in full."""

    def as_turn(self) -> dict[str, Any]:
        """Return the turn for a chat template, with all the keys that its row has."""
        if self.raw:
            turn: dict[str, Any] = json.loads(self.raw)
            return turn
        turn = {"role": self.role, "content": self.content}
        if self.reasoning:
            turn[REASONING[0]] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [_as_plain(call) for call in self.tool_calls]
        return turn

    @property
    def is_empty(self) -> bool:
        """True for a turn without content and tool calls."""
        return not self.content.strip() and not self.tool_calls


def _as_plain(call: ToolCall) -> dict[str, Any]:
    plain = {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
    return plain if call.id is None else {"id": call.id, **plain}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The turns of a conversation, with a mask of the supervised ones."""

    messages: tuple[Message, ...]
    supervised: tuple[bool, ...]
    """For each message, True if it is trained on; True for the assistant's only."""
    tools: str = ""
    """Tools that the assistant may call: a JSON list of function descriptions, as text. Empty for none."""
    template_kwargs: str = ""
    """Variables of the chat template that its row sets: a JSON object, as text. Empty for none."""
    weights: tuple[float, ...] = ()
    """For each message, the weight of its tokens in the loss, above 0 for the supervised ones only. Empty where each of
    them has weight 1."""
    is_plain: bool = False
    """True for text without a chat template: the contents of the messages follow each other as they are."""

    def weight(self, i: int) -> float:
        """Return the weight of message i in the loss."""
        return self.weights[i] if self.weights else float(self.supervised[i])


@dataclasses.dataclass(frozen=True)
class Preference:
    """A prompt with a better and a worse answer."""

    prompt: tuple[Message, ...]
    chosen: Message
    rejected: Message
    tools: str = ""
    """Tools as in `Conversation`."""
    template_kwargs: str = ""
    """Variables of the chat template as in `Conversation`."""
    margin: float | None = None
    """Margin by which the chosen answer should score higher; None where its row has none, or the stage reads none."""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """A prompt with several answers, of which pairs are made."""

    prompt: tuple[Message, ...]
    answers: tuple[Message, ...]
    scores: tuple[float, ...]
    """For each answer, a number that is larger for a better one."""
    tools: str = ""
    """Tools as in `Conversation`."""
    template_kwargs: str = ""
    """Variables of the chat template as in `Conversation`."""

    def pairs(self, which: Literal["all", "best"]) -> list[Preference]:
        """Return the pairs of answers with different scores, the best chosen answers first.

        Args:
            which: "all" for every such pair; "best" for those of the best answer, the first one where several are.
        """
        order = sorted(range(len(self.answers)), key=lambda i: -self.scores[i])
        chosen = order[:1] if which == "best" else order
        return [
            Preference(self.prompt, self.answers[i], self.answers[j], self.tools, self.template_kwargs)
            for i in chosen
            for j in order
            if self.scores[i] > self.scores[j]
        ]


@dataclasses.dataclass(frozen=True)
class Unpaired:
    """A prompt with one answer, which is desirable or not."""

    prompt: tuple[Message, ...]
    completion: Message
    desirable: bool
    tools: str = ""
    """Tools as in `Conversation`."""
    template_kwargs: str = ""
    """Variables of the chat template as in `Conversation`."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation to answer: it ends with a turn of the user or of a tool."""

    messages: tuple[Message, ...]
    tools: str = ""
    """Tools as in `Conversation`."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """The other columns of the row, for rewards. If the row has an answer to the prompt, it is left out of `messages`
    and becomes the column "answer", unless there is another one of this name."""
    template_kwargs: str = ""
    """Variables of the chat template as in `Conversation`."""


TYPES: Mapping[str, type] = {
    "conversation": Conversation,
    "preference": Preference,
    "unpaired": Unpaired,
    "prompt": Prompt,
}
"""Class of a row by the kind of rows that a stage of llmsuite trains on."""


def with_answer(prompt: Sequence[Message], answer: Message, tools: str = "", template_kwargs: str = "") -> Conversation:
    """Return a prompt with its answer, which is the only supervised turn."""
    return Conversation((*prompt, answer), (*[False] * len(prompt), True), tools, template_kwargs)


def with_default_system(row: Any, text: str) -> Any:
    """Return a row of a kind of `TYPES` with a system turn in front, unless it has one."""
    turn = Message("system", text)
    turns = row.messages if isinstance(row, (Conversation, Prompt)) else row.prompt
    if any(message.role == "system" for message in turns):
        return row
    turns = (turn, *turns)
    if isinstance(row, Conversation):
        weights = (0.0, *row.weights) if row.weights else ()
        return dataclasses.replace(row, messages=turns, supervised=(False, *row.supervised), weights=weights)
    if isinstance(row, Prompt):
        return dataclasses.replace(row, messages=turns)
    return dataclasses.replace(row, prompt=turns)


def conversations_of(row: Any) -> list[Conversation]:
    """Return the conversations of a row, one for each of its answers. Empty for rows of a plugin's kind."""
    if isinstance(row, Conversation):
        return [row]
    if isinstance(row, Prompt):
        return [Conversation(row.messages, (False,) * len(row.messages), row.tools, row.template_kwargs)]
    if isinstance(row, Preference):
        answers = (row.chosen, row.rejected)
        return [with_answer(row.prompt, answer, row.tools, row.template_kwargs) for answer in answers]
    if isinstance(row, Ranking):
        return [with_answer(row.prompt, answer, row.tools, row.template_kwargs) for answer in row.answers]
    if isinstance(row, Unpaired):
        return [with_answer(row.prompt, row.completion, row.tools, row.template_kwargs)]
    return []


def turns_of(row: Any) -> list[tuple[str, str]]:
    """Return all texts of a row that its author wrote, each with the role of its turn.

    They are contents, thoughts, names and calls; those of tool descriptions have the role of the user. Empty for rows
    of a plugin's kind.
    """
    found: dict[tuple[str, str], None] = {}
    for conversation in conversations_of(row):
        for message in conversation.messages:
            values = [value for key, value in message.as_turn().items() if key != "role"]
            found.update(dict.fromkeys((message.role, text) for text in strings_in(values)))
        if conversation.tools:
            found.update(dict.fromkeys(("user", text) for text in strings_in(json.loads(conversation.tools))))
        if conversation.template_kwargs:
            given = json.loads(conversation.template_kwargs)
            found.update(dict.fromkeys(("user", text) for text in strings_in(list(given.values()))))
    return list(found)


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, including keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)
